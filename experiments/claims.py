"""The paper's claims that these experiments can speak to, each with the differences that bear on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments import vision_results as vision
from experiments.comparisons import Comparison, beyond_noise
from experiments.mqar_results import axis, best_mean
from experiments.records import Row, select, values

Records = Callable[[str], list[Row]]


@dataclass(frozen=True)
class Claim:
    """A claim, as differences that it says are positive."""

    text: str
    source: str
    """Where the paper makes it, with its figures."""
    comparisons: Sequence[Comparison]

    @property
    def verdict(self) -> str:
        """What these runs say, the differences judged together."""
        found = beyond_noise(self.comparisons)
        pairs = list(zip(self.comparisons, found, strict=True))
        agree = sum(is_found and c.difference > 0 for c, is_found in pairs)
        contradict = sum(is_found and c.difference < 0 for c, is_found in pairs)
        total = len(self.comparisons)
        if not total:
            return "not run"
        if agree and not contradict:
            name = "agrees"
        elif contradict and not agree:
            name = "**contradicts**"
        else:
            name = "mixed" if agree else "not decided"
        return (
            f"{name}: {agree} for, {contradict} against, {total - agree - contradict} within noise"
        )


def all_claims(reported: Records) -> list[Claim]:
    """Return the claims.

    Args:
        reported: Returns the runs of a record, by name.
    """
    ablations = reported("vision_ablations")
    others = ("linear_attention", "retnet", "gla", "deltanet")
    return [
        Claim(
            "Longhorn recalls more than Mamba",
            "Fig. 4: near-perfect at 512 tokens with 64 channels",
            recall(reported, "longhorn", "mamba"),
        ),
        Claim(
            "Longhorn recalls more than linear attention, RetNet, GLA and DeltaNet",
            "the systems of Table 4; no figures for all",
            [c for other in others for c in recall(reported, "longhorn", other)],
        ),
        Claim(
            "the exact form recalls more than the diagonal one",
            "toy recall task",
            recall(reported, "longhorn_exact", "longhorn"),
        ),
        Claim(
            "a step size per channel beats one for all channels",
            "language model, loss 3.225 against 3.262",
            [
                *recall(reported, "longhorn", "longhorn_scalar"),
                *(
                    Comparison(f"top1, digits ablation, {form}", "vector", "scalar", c.b, c.a)
                    for form in vision.variants.FORMS
                    for name, c in vision.ablations(ablations, form).items()
                    if name.startswith("scalar")
                ),
            ],
        ),
        Claim(
            "ViL classifies better than ViM",
            "Table 3: 76.4 against 76.1, 80.7 against 80.5",
            [c for name in vision.COMPARED for c in classified(reported, name, "ViL", "ViM")],
        ),
        Claim(
            "Longhorn extrapolates to 16 times the training length",
            "language model, perplexity",
            [
                *(c for name in ("longhorn", "longhorn_exact") for c in longer(reported, name)),
                *(c for name in ("ViL", "ViL exact") for c in larger(reported, name)),
            ],
        ),
    ]


def recall(
    reported: Records, first: str, second: str, kinds: Sequence[str] = ("pairs",)
) -> list[Comparison]:
    """Compare the accuracies of two recurrences at each number of pairs, or at each length.

    Args:
        reported: Returns the runs of a record.
        first: A recurrence.
        second: Another.
        kinds: "pairs", "length" or both.
    """
    found = []
    for setting in ("short", "long"):
        rows = best_mean(reported(f"mqar_{setting}"))
        figures = [name for row in rows[:1] for name in row if name.split(" ")[0] in kinds]
        for figure in figures:
            numbers = [
                [100 * v for v in values(rows, figure, recurrence=r)] for r in (first, second)
            ]
            if all(numbers):
                found.append(Comparison(f"recall, {setting}, {figure}", first, second, *numbers))
    return found


def longer(reported: Records, recurrence: str) -> list[Comparison]:
    """Compare a recurrence's accuracy at the greatest length with that at the trained one."""
    found = []
    for setting in ("short", "long"):
        rows = select(best_mean(reported(f"mqar_{setting}")), recurrence=recurrence)
        if rows:
            lengths = axis(rows, "length")
            ends = [
                [100 * v for v in values(rows, f"length {n}")] for n in (lengths[-1], lengths[0])
            ]
            found.append(Comparison(f"recall, {setting}, {recurrence}", "16 x", "1 x", *ends))
    return found


def larger(reported: Records, model: str) -> list[Comparison]:
    """Compare a model's top-1 at the most tokens with that at the trained number."""
    return [
        Comparison(
            f"top1, {name}, {kind}, {model}",
            "16 x",
            "1 x",
            *(vision.at_tokens(rows, model, kind, n) for n in (vision.tokens(rows)[-1], 1)),
        )
        for name in vision.COMPARED
        if (rows := reported(f"vision_{name}"))
        for kind in ("resized", "padded")
    ]


def classified(reported: Records, name: str, first: str, second: str) -> list[Comparison]:
    """Compare the top-1 of two models at every size of an experiment's training set."""
    rows = reported(f"vision_{name}")
    return [
        Comparison(
            f"top1, {name}, {size} a class",
            first,
            second,
            *(
                values(select(rows, images_per_class=size), "top1", model=m)
                for m in (first, second)
            ),
        )
        for size in vision.sizes(rows)
    ]


def table(claims: Sequence[Claim]) -> str:
    """Return the claims and what these runs say as a Markdown table."""
    lines = ["| the paper says | where | here |", "|---|---|---|"]
    lines += [f"| {claim.text} | {claim.source} | {claim.verdict} |" for claim in claims]
    return "\n".join(lines)
