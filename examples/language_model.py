"""Train a language model of characters on any text, on a CPU, and let it continue a prompt.

    python examples/language_model.py
    python examples/language_model.py book.txt --recurrence longhorn_exact --steps 1000
    python examples/language_model.py --prompt "The import statement"

By default it learns from Python's manual of its statements, which comes with Python. With ``--prompt`` it
loads the weights of the last run instead of training. A block is that of the Longhorn paper: a short
convolution, a scan and a gate. Both the convolution and the scan carry what they remember, so a token costs
the same after any number of others. Losses are nats per character of the last tenth of the text.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other processes cost little (docs/speed.md)

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vil.kernels import ops
from vil.training.files import write_atomically

Cache = tuple[Tensor, Tensor | None]
"""What a block remembers: inputs of the convolution, (B, K - 1, E), and the state, (B, E, M)."""


class CausalBlock(nn.Module):
    """Pre-norm residual block whose scan reads earlier tokens only; E = expand * dim channels.

    Args:
        dim: Width of the tokens.
        depth: Number of blocks in the model; initial outputs are divided by its square root.
        recurrence: "longhorn", "longhorn_exact" or "mamba".
        d_state: State size M per channel.
        d_conv: Taps K of the convolution.
        expand: Channels of the scan per channel of a token.
    """

    def __init__(
        self, dim: int, depth: int, recurrence: str = "longhorn", d_state: int = 16, d_conv: int = 4, expand: int = 2
    ) -> None:
        super().__init__()
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.recurrence, self.sizes = recurrence, (rank, d_state, d_state)
        self.norm = nn.RMSNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, d_conv, groups=inner)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        with torch.no_grad():
            self.out_proj.weight.div_(depth**0.5)
            nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
            nn.init.zeros_(self.dt_proj.bias)
        if recurrence == "mamba":
            steps = torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_proj.bias.data = steps + torch.log(-torch.expm1(-steps))  # inverse of softplus
            self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(inner, 1))

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return tokens, (B, L, dim), and what the next call continues from."""
        x, z = self.in_proj(self.norm(tokens)).chunk(2, dim=-1)
        before = x.new_zeros(x.shape[0], self.conv.kernel_size[0] - 1, x.shape[2]) if cache is None else cache[0]
        x = torch.cat((before, x), dim=1)
        remembered, x = x[:, x.shape[1] - before.shape[1] :], F.silu(self._convolve(x, tokens.shape[1]))
        dt, k, q = self.x_proj(x).split(self.sizes, dim=-1)
        dt, bias = F.linear(dt, self.dt_proj.weight), self.dt_proj.bias
        carried = {"initial_state": None if cache is None else cache[1], "return_final_state": True}
        if self.recurrence == "mamba":
            y, state = ops.mamba_scan(x, dt, -self.A_log.exp(), q, k, self.D, bias, **carried)
        else:
            y, state = ops.longhorn_scan(x, dt, q, k, self.D, bias, recurrence=self.recurrence, **carried)
        return tokens + self.out_proj(y * F.silu(z)), (remembered, state)

    def _convolve(self, x: Tensor, length: int) -> Tensor:
        # A sum over few taps: one token after another gets the same bits as all at once.
        taps = self.conv.weight[:, 0].unbind(1)
        return self.conv.bias + sum(tap * x[:, i : i + length] for i, tap in enumerate(taps))


class LanguageModel(nn.Module):
    """Logits of the next character.

    Args:
        characters: Number of different characters.
        embed_dim: Width of the tokens.
        depth: Number of blocks.
        recurrence: Same as in ``CausalBlock``.
    """

    def __init__(self, characters: int, embed_dim: int = 128, depth: int = 4, recurrence: str = "longhorn") -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embed_dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(CausalBlock(embed_dim, depth, recurrence) for _ in range(depth))
        self.norm = nn.RMSNorm(embed_dim)
        self.head = nn.Linear(embed_dim, characters, bias=False)

    def forward(self, ids: Tensor, caches: list[Cache] | None = None) -> tuple[Tensor, list[Cache]]:
        """Return logits, (B, L, characters), of ids, (B, L), and caches from which the next call continues."""
        tokens, after = self.embedding(ids), []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            tokens, cache = block(tokens, cache)
            after.append(cache)
        return self.head(self.norm(tokens)), after


@torch.inference_mode()
def generate(
    model: LanguageModel, prompt: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Yield characters that continue a prompt, (L,): its tokens at once, then one token at a time."""
    logits, caches = model(prompt[None])
    for _ in range(length):
        chances = (logits[0, -1] / temperature).softmax(0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        yield drawn.item()
        logits, caches = model(drawn[None], caches)


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:
    """Return the mean loss per character of windows, (B, L + 1), from their second character on."""
    logits, _ = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def held_out_loss(model: LanguageModel, ids: Tensor, window: int, batch_size: int) -> float:
    """Return the mean loss of windows that do not overlap."""
    windows = ids.unfold(0, window + 1, window)
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(batch_size)) / len(windows)


def train(model: LanguageModel, ids: Tensor, args: argparse.Namespace) -> None:
    """Train, and print losses ten times; the last tenth of the text is held out."""
    cut = len(ids) - len(ids) // 10
    learnt, held_out = ids[:cut], ids[cut:]
    if len(held_out) <= args.window:
        raise ValueError(
            f"the text must have more than {10 * (args.window + 1)} characters for --window {args.window}, "
            f"got {len(ids)}"
        )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    # In few steps the warm-up takes more than a tenth: PyTorch divides by zero if it ends at the first step.
    warm_up = min(0.75, max(0.1, 1.5 / args.steps))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.steps, pct_start=warm_up, cycle_momentum=False
    )
    generator, started = torch.Generator().manual_seed(args.seed), time.process_time()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(learnt) - args.window, (args.batch_size,), generator=generator)
        loss = loss_of(model, torch.stack([learnt[start : start + args.window + 1] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == args.steps or step % max(args.steps // 10, 1) == 0:
            value = held_out_loss(model, held_out, args.window, args.batch_size)
            used = time.process_time() - started
            print(f"step {step}  loss {loss.item():.3f}  held out {value:.3f}  {used:.0f} CPU seconds", flush=True)


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("text", nargs="?", type=Path, help="file to learn, UTF-8; Python's manual without it")
    add("--prompt", help="continue this text with the weights in --output, without training")
    add("--characters", type=int, default=400, help="to write after the prompt (400)")
    add("--temperature", type=float, default=0.7, help="above 0; lower is less surprising (0.7)")
    add("--recurrence", choices=ops.RECURRENCES, default="longhorn")
    add("--embed-dim", type=int, default=128, help="(128)")
    add("--depth", type=int, default=4, help="blocks (4)")
    add("--window", type=int, default=256, help="characters of a training example (256)")
    add("--batch-size", type=int, default=16, help="(16)")
    add("--steps", type=int, default=300, help="(300)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (2e-3)")
    add("--seed", type=int, default=0, help="of weights, windows and drawn characters (0)")
    add("--output", type=Path, default=Path("output/language_model"), help="folder of weights.pt")
    args = parser.parse_args()
    if args.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {args.temperature}")
    return args


def trained(args: argparse.Namespace) -> tuple[LanguageModel, str]:
    """Train a model and save it; return it and its characters in the order of its ids."""
    text = "\n\n".join(topics.values()) if args.text is None else args.text.read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    place = {character: i for i, character in enumerate(characters)}
    sizes = {"embed_dim": args.embed_dim, "depth": args.depth, "recurrence": args.recurrence}
    model = LanguageModel(len(characters), **sizes)
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(text):,} characters, {len(characters)} different; {count:,} parameters")
    train(model, torch.tensor([place[character] for character in text]), args)
    args.output.mkdir(parents=True, exist_ok=True)
    saved = {"characters": characters, "sizes": sizes, "weights": model.state_dict()}
    write_atomically(args.output / "weights.pt", lambda file: torch.save(saved, file))
    return model, characters


def loaded(path: Path) -> tuple[LanguageModel, str]:
    """Return the model that ``trained`` saved, and its characters."""
    saved = torch.load(path, weights_only=True)
    model = LanguageModel(len(saved["characters"]), **saved["sizes"])
    model.load_state_dict(saved["weights"])
    return model, saved["characters"]


def main() -> None:
    """Train or load a model, and print what it writes."""
    args = options()
    torch.manual_seed(args.seed)
    model, characters = trained(args) if args.prompt is None else loaded(args.output / "weights.pt")
    prompt = args.prompt or characters[0]
    unknown = sorted(set(prompt) - set(characters))
    if unknown:
        raise ValueError(f"--prompt must consist of characters of the text, got {unknown}")
    ids = torch.tensor([characters.index(character) for character in prompt])
    print(prompt, end="")
    generator = torch.Generator().manual_seed(args.seed)
    for i in generate(model.eval(), ids, args.characters, args.temperature, generator):
        print(characters[i], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
