"""Borrowed memory belongs to an operator until it returns, and is never part of a result."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vil.kernels import workspace

SHAPE, NEEDED = (3, 5), 64  # 60 bytes, rounded up to the alignment


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_memory", workspace._Memory())


def lent_twice() -> list[Tensor]:
    with workspace.arena:
        return [workspace.empty(SHAPE, torch.float32) for _ in range(2)]


def test_what_the_first_call_needed_is_there_for_the_next() -> None:
    first = lent_twice()
    again, other = lent_twice()
    assert workspace._memory.buffer.nbytes == 2 * NEEDED
    assert again.data_ptr() == workspace._memory.buffer.data_ptr() not in {tensor.data_ptr() for tensor in first}
    assert other.data_ptr() - again.data_ptr() == NEEDED
    assert (again.shape, again.dtype, again.is_contiguous()) == (SHAPE, torch.float32, True)


def test_an_error_ends_a_call() -> None:
    with pytest.raises(RuntimeError), workspace.arena:
        workspace.bmm(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    assert workspace._memory.taken is None


def test_threads_have_memory_of_their_own() -> None:
    own = (lent_twice(), lent_twice())[1]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: (lent_twice(), lent_twice())[1]).result()
    assert not {t.data_ptr() for t in own} & {t.data_ptr() for t in others}


def test_fake_tensors_are_not_kept() -> None:
    with FakeTensorMode():
        assert isinstance(lent_twice()[0], FakeTensor)
    assert workspace._memory.buffer is None
    lent_twice()
    with FakeTensorMode():
        assert isinstance(lent_twice()[0], FakeTensor)
