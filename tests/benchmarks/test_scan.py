"""The GPU benchmark of the scans, all but its clock: on the CPU, in plain PyTorch."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import budget, contestants, delta_rule, roofline, scan, scan_results
from benchmarks.contestants import Contestant
from vil.kernels import ops

H200 = roofline.Device("NVIDIA H200", multiprocessors=132, clock_hz=1.755e9, bandwidth=4.3e12)
SMALL = (2, 20, 64)


class FakeClock:
    """Counts instead of timing: each call is one ms longer than the last."""

    def __init__(self) -> None:
        self.calls = 0

    def warm_up(self, run: Callable[[], object]) -> float:
        """Take no time."""
        return 0.0

    def time(self, run: Callable[[], object], submission_s: float) -> float:
        """Return the number of this call."""
        self.calls += 1
        return float(self.calls)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return one MiB."""
        return 1 << 20


def fake_selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> Tensor:
    """Compute what mamba-ssm documents: u, delta, z (B, D, L), B, C (B, N, L), A (D, N)."""
    assert delta_softplus
    step = F.softplus(delta + delta_bias[:, None])
    state, outputs = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        write = (step * u)[..., t, None] * B[:, None, :, t]
        state = torch.exp(step[..., t, None] * A) * state + write
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return (torch.stack(outputs, -1) + D[:, None] * u) * F.silu(z)


def fake_extension() -> SimpleNamespace:
    """Return a stand-in of the compiled module, with its argument order and group axes."""

    def gated(u, delta, A, B, C, D, z, bias):
        return fake_selective_scan(u, delta, A, B.squeeze(1), C.squeeze(1), D, z, bias, True)

    def fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
        assert delta_softplus
        assert B.ndim == C.ndim == 4
        out = gated(u, delta, A, B, C, D, z, delta_bias)
        return [torch.full_like(out, 7), torch.full_like(A, 8), out]

    def bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z):
        assert (out == 7).all()
        assert (x == 8).all()
        assert dz is None
        assert delta_softplus
        assert not recompute_out_z
        _, pull_back = torch.func.vjp(gated, u, delta, A, B, C, D, z, delta_bias)
        du, ddelta, dA, dB, dC, dD, dz, dbias = pull_back(dout)
        return [du, ddelta, dA, dB, dC, dD, dbias, dz]

    return SimpleNamespace(fwd=fwd, bwd=bwd)


def fake_chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool
) -> tuple[Tensor, None]:
    """Compute what flash-linear-attention documents, token by token: q, k, v (B, L, H, N)."""
    assert use_qk_l2norm_in_kernel
    q, k = (F.normalize(t, dim=-1) for t in (q, k))
    state, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        seen = (state * k[:, t, ..., None]).sum(-2)
        error = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, ..., None] * error[..., None, :]
        outputs.append((state * q[:, t, ..., None]).sum(-2) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, 1), None


def error_in_float64(contestant: Contestant, shape: tuple[int, int, int]) -> float:
    """Return the worst error of outputs and gradients, in float64."""
    inputs = contestants.make_inputs(shape, "cpu", torch.float64)
    entry = scan.admit(contestant, inputs, contestants.truth(contestant.task, inputs), 60)
    assert entry.status == "ok"
    return entry.error


@pytest.mark.parametrize(
    ("task", "pass_name", "microseconds"),
    [
        ("longhorn_exact", "inference", 34),
        ("longhorn_exact", "training forward", 50),  # by memory
        ("longhorn_exact", "forward + backward", 149),
        ("longhorn", "inference", 76),
        ("longhorn", "forward + backward", 327),
        ("mamba", "forward + backward", 183),  # forward by exponentials, backward by memory
    ],
)
def test_roofline_is_the_one_of_the_design(task: str, pass_name: str, microseconds: int) -> None:
    time_ms = roofline.roofline_ms(task, pass_name, (128, 197, 384), H200)
    assert 1e3 * time_ms == pytest.approx(microseconds, abs=1)


@pytest.mark.parametrize("length", [1, 16, 33, 300])
def test_pytorch_scan_matches_reference(length: int) -> None:
    contestant = Contestant("PyTorch", "longhorn", contestants.chunked_scan)
    assert error_in_float64(contestant, (2, length, 3)) < 1e-12


def test_pytorch_scan_is_one_graph() -> None:
    compiled = torch.compile(contestants.chunked_scan, backend="aot_eager", fullgraph=True)
    assert error_in_float64(Contestant("PyTorch", "longhorn", compiled), (1, 33, 2)) < 1e-12


def test_layout_for_mamba_ssm_matches_reference() -> None:
    run = contestants.selective_scan_pair(fake_selective_scan)
    contestant = contestants.SelectiveScanPair("pair", "mamba", run)
    assert error_in_float64(contestant, (2, 19, 5)) < 1e-12


def test_compiled_module_of_mamba_ssm_is_called_as_it_wants() -> None:
    run = contestants.selective_scan_pair(contestants.selective_scan_by(fake_extension()))
    contestant = contestants.SelectiveScanPair("pair", "mamba", run)
    assert error_in_float64(contestant, (2, 7, 5)) < 1e-12


def test_layout_for_mamba_ssm_is_contiguous_and_undone() -> None:
    inputs = contestants.make_inputs(SMALL, "cpu")
    tensors = contestants.tensors_of("mamba", inputs)
    pair = contestants.SelectiveScanPair("pair", "mamba", contestants.attention)
    own = pair.arrange(tensors)
    assert all(tensor.is_contiguous() for tensor in own)
    restored = pair.restore(own, tuple(tensors))
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


def test_attention_matches_softmax() -> None:
    contestant = Contestant("SDPA", "attention", contestants.attention)
    assert error_in_float64(contestant, (2, 9, 128)) < 1e-12


def test_delta_rule_of_both_directions_matches_the_triangular_system() -> None:
    run = delta_rule.both_ways(fake_chunk_delta_rule)
    contestant = Contestant("fla", "delta", run)
    assert error_in_float64(contestant, (2, 21, 128)) < 1e-12


def test_delta_rule_is_missing_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    monkeypatch.setattr(delta_rule.importlib, "import_module", fail)
    assert delta_rule.find()[1] == "not installed"


def test_mamba_ssm_is_missing_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: None)
    assert contestants.mamba_ssm().missing == "not installed"


def test_mamba_ssm_built_for_another_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(contestants.importlib, "import_module", fail)
    assert contestants.mamba_ssm().missing == "cannot be imported: undefined symbol: _ZN3c10"


def wrong_gradient(*tensors: Tensor) -> Tensor:
    """Scan with the gradient of q doubled."""
    x, dt, q, *rest = tensors
    return contestants.chunked_scan(x, dt, 2 * q - q.detach(), *rest)


def not_finite(*tensors: Tensor) -> Tensor:
    """Scan with one output that is not a number."""
    out = contestants.chunked_scan(*tensors)
    return torch.cat((out[:-1], out[-1:] * float("nan")))


def only_wrong_without_autograd(*tensors: Tensor) -> Tensor:
    """Scan rightly as long as gradients are recorded."""
    return contestants.chunked_scan(*tensors) * (1 if torch.is_grad_enabled() else 1.1)


def raises(*tensors: Tensor) -> Tensor:
    """Fail as a compiler does."""
    raise RuntimeError("out of resource: shared memory\nRequired: 1")


def sleeps(*tensors: Tensor) -> Tensor:
    """Take longer than the limit."""
    time.sleep(10)
    return tensors[0]


@pytest.mark.parametrize(
    ("run", "status", "disagrees"),
    [
        (contestants.chunked_scan, "ok", False),
        (wrong_gradient, "disagrees with the reference (gradient of q: error 1 > 0.016)", True),
        (not_finite, "disagrees with the reference (inference: error inf > 0.016)", True),
        (only_wrong_without_autograd, "disagrees with the reference (inference: error 0.1", True),
        (raises, "failed: RuntimeError: out of resource: shared memory", False),
        (sleeps, "failed: TimeLimitError: not compiled within 0.2 s", False),
    ],
)
def test_gate(run: Callable[..., Tensor], status: str, disagrees: bool) -> None:
    inputs = contestants.make_inputs((2, 17, 4), "cpu")
    exact = contestants.truth("longhorn", inputs)
    entry = scan.admit(
        Contestant("it", "longhorn", run), inputs, exact, 0.2 if run is sleeps else 60
    )
    assert entry.status.startswith(status)
    assert entry.disagrees == disagrees
    assert bool(entry.passes) == (status == "ok")


def play(players: list[Contestant]) -> list[dict]:
    """Return the rows of one shape, with the clock faked and our operators served on the CPU."""
    with ops.use_backend("reference"):
        return scan.run_shape(SMALL, players, H200, FakeClock(), repetitions=3, place="cpu")


def all_players(**replaced: Callable[..., Tensor]) -> list[Contestant]:
    """Return the contestants with a mamba-ssm that is faked and nothing compiled."""
    players = contestants.contestants()
    pair = contestants.selective_scan_pair(fake_selective_scan)
    players[3] = contestants.SelectiveScanPair(contestants.MAMBA_SSM, "mamba", pair)
    players[4] = dataclasses.replace(players[4], run=contestants.chunked_scan)
    delta = delta_rule.both_ways(fake_chunk_delta_rule)
    players[6] = dataclasses.replace(players[6], run=delta, missing="")
    return [
        dataclasses.replace(player, run=replaced.get(player.task, player.run)) for player in players
    ]


def test_all_contestants_agree_and_are_timed_in_turns(tmp_path: Path) -> None:
    players = all_players()
    rows = play(players)
    assert [row["status"] for row in rows] == ["ok"] * 7 * len(roofline.PASSES)
    assert scan_results.refused(rows) == ""
    json.dumps(rows, allow_nan=False)
    exact, peer = rows[0], rows[3]
    assert (exact["ms"], peer["ms"]) == (8, 11)  # turns of seven: 1, 8, 15 and 4, 11, 18
    assert exact["iqr_ms"] == 7
    assert exact["faster_than_mamba_ssm"] == pytest.approx(11 / 8)
    assert exact["faster_than"][contestants.FLASH] == pytest.approx(13 / 8)
    assert exact["of_roofline"] == 8 / roofline.roofline_ms(
        "longhorn_exact", "inference", SMALL, H200
    )
    assert "roofline_ms" not in peer
    assert scan_results.table(rows).count("\n") == 1 + len(rows)
    scan_results.draw(tmp_path / "scan.png", rows, "a title")
    assert (tmp_path / "scan.png").read_bytes().startswith(b"\x89PNG")


def test_disagreement_is_in_every_output(tmp_path: Path) -> None:
    players = all_players(longhorn=wrong_gradient)
    players[3] = dataclasses.replace(players[3], missing="not installed")
    rows = play(players)
    diagonal = [row for row in rows if row["contestant"] == "Longhorn diagonal (ours)"]
    assert all(row["disagrees"] and "ms" not in row for row in diagonal)
    assert "**disagrees with the reference (gradient of q" in scan_results.table(rows)
    complaint = scan_results.refused(rows)
    assert complaint.count("REFUSED") == 2  # ours, and that of plain PyTorch, once each
    assert "not installed" in scan_results.table(rows)
    assert "not installed" not in complaint
    assert not any("faster_than_mamba_ssm" in row for row in rows)
    scan_results.draw(tmp_path / "scan.png", rows, "a title")


def test_failure_of_ours_is_refused_but_not_of_others() -> None:
    row = {"shape": [1, 1, 64], "contestant": "it", "status": "failed", "disagrees": False}
    assert scan_results.refused([{**row, "ours": True}])
    assert not scan_results.refused([{**row, "ours": False}])


@pytest.mark.parametrize(
    ("device", "ratio", "verdicts"),
    [
        ("NVIDIA H200", 1.3, ["met", "not measured", "not measured", "not measured"]),
        ("NVIDIA H200", 1.4, ["missed", "not measured", "not measured", "not measured"]),
        ("NVIDIA A100", 1.3, ["not measured"] * 4),
    ],
)
def test_aims(device: str, ratio: float, verdicts: list[str]) -> None:
    row = {
        "shape": [128, 197, 384],
        "pass": "inference",
        "contestant": "Longhorn exact (ours)",
        "of_roofline": ratio,
    }
    aims = scan_results.judge([row], device)
    assert [aim["verdict"] for aim in aims] == verdicts
    assert scan_results.aims_table(aims).count("not measured") == verdicts.count("not measured")


def test_aims_name_contestants_there_are() -> None:
    names = {player.name for player in contestants.contestants()}
    assert {aim.contestant for aim in scan_results.AIMS} | {contestants.MAMBA_SSM} <= names


def run_main(
    monkeypatch: pytest.MonkeyPatch, players: list[Contestant], arguments: list[str]
) -> int:
    """Run the script with all that needs a GPU replaced."""
    original = scan.run_shape

    def run_shape(*arguments: object, **options: object) -> list[dict]:
        return original(*arguments, **options | {"place": "cpu"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(scan, "probe", lambda: H200)
    monkeypatch.setattr(scan, "CudaClock", lambda clock_hz: FakeClock())
    monkeypatch.setattr(scan, "contestants", lambda: players)
    monkeypatch.setattr(scan, "run_shape", run_shape)
    reference = functools.partial(ops.use_backend, "reference")
    monkeypatch.setattr(scan.ops, "use_backend", lambda name: reference())
    return scan.main(arguments)


def test_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "it.json"
    arguments = ["--shapes", "1,5,64", "2,3,64", "--repetitions", "2", "--output", str(output)]
    assert run_main(monkeypatch, all_players(), arguments) == 0
    result = json.loads(output.read_text())
    assert len(result["rows"]) == 2 * 7 * 3
    assert result["environment"]["name"] == "NVIDIA H200"
    assert [aim["verdict"] for aim in result["aims"]] == ["not measured"] * 4
    assert sorted(path.name for path in output.parent.iterdir()) == ["it.json", "it.png"]
    printed = capsys.readouterr()
    assert printed.out.count("| Longhorn exact (ours) |") == 2 * 3
    assert "REFUSED" not in printed.err


def test_time_that_is_up_and_the_rest_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time only the shape that was missing is measured."""
    output = tmp_path / "it.json"
    shapes = ["--shapes", "1,5,64", "2,3,64", "--repetitions", "2", "--output", str(output)]
    players = [all_players()[1]]
    assert run_main(monkeypatch, players, [*shapes, "--seconds", "0"]) == budget.UNFINISHED
    assert not output.exists()
    assert run_main(monkeypatch, players, [shapes[0], shapes[1], *shapes[3:]]) == 0
    first = json.loads(output.read_text())["rows"]
    assert run_main(monkeypatch, players, [*shapes, "--resume"]) == 0
    both = json.loads(output.read_text())["rows"]
    assert both[:3] == first
    assert [row["shape"] for row in both] == [[1, 5, 64]] * 3 + [[2, 3, 64]] * 3


def test_a_shape_that_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_shape(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    output = tmp_path / "it.json"
    monkeypatch.setattr(scan, "run_shape", run_shape)
    arguments = ["--shapes", "1,5,64", "--output", str(output)]
    monkeypatch.setattr(scan, "toy_contestants", lambda: all_players()[:1])
    assert scan.main(["--toy", *arguments]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert {row["status"] for row in rows} == {"failed: OutOfMemoryError: CUDA out of memory"}


def test_toy_goes_through_the_reference(tmp_path: Path) -> None:
    output = tmp_path / "it.json"
    arguments = ["--shapes", "1,5,64", "--repetitions", "2", "--output", str(output)]
    assert scan.main(["--toy", *arguments]) == 0
    result = json.loads(output.read_text())
    assert result["environment"]["name"].startswith("toy on ")
    ours = [row for row in result["rows"] if row["ours"]]
    assert all(row["status"] == "ok" for row in ours)


def test_exit_status_of_a_disagreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    players = [Contestant("it", "longhorn", wrong_gradient)]
    arguments = ["--shapes", "1,5,64", "--repetitions", "2", "--output", str(tmp_path / "it.json")]
    assert run_main(monkeypatch, players, arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("REFUSED: it at (1, 5, 64)")


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert scan.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "needs a CUDA GPU" in printed.err


@pytest.mark.parametrize(
    "arguments", [["--shapes", "8,197"], ["--shapes", "8,197,100"], ["--repetitions", "1"]]
)
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        scan.parse(arguments)
