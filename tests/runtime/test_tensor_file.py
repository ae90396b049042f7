import time

import pytest
import torch
from safetensors.torch import save_file

from host.emulator.observe import cached_bytes, drop_page_cache
from runtime.errors import BundleError
from runtime.memory import MIB, memory_bytes
from runtime.tensor_file import TensorFile


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64])
def test_tensors_come_back_whatever_the_dtype_and_after_release(tmp_path, dtype):
    value = (torch.arange(24).reshape(2, 3, 4) - 12).to(dtype)
    save_file({"a": value, "b": torch.zeros(3)}, tmp_path / "x.safetensors", {"note": "hi"})
    file = TensorFile(tmp_path / "x.safetensors")
    file.will_need()
    assert torch.equal(file.tensor("a"), value)
    for forget in (False, True):
        file.release(forget=forget)
        assert torch.equal(file.tensor("a"), value)
    assert file.metadata == {"note": "hi"}
    assert sorted(file.names()) == ["a", "b"]


@pytest.mark.parametrize("kernel", [(6, 6), (5, 10)])
def test_a_file_that_will_be_needed_is_read_and_mapped(tmp_path, monkeypatch, kernel):
    monkeypatch.setattr("runtime.tensor_file.KERNEL", kernel)
    size = 24 * MIB
    save_file({"a": torch.ones(size // 4)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    drop_page_cache([file.path])
    assert cached_bytes([file.path]) < size // 2
    before = memory_bytes()[1]
    file.will_need()
    deadline = time.monotonic() + 30
    while cached_bytes([file.path]) < size and time.monotonic() < deadline:  # the older kernel reads on its own
        time.sleep(0.01)
    assert cached_bytes([file.path]) >= size
    mapped = memory_bytes()[1] - before
    assert mapped > size - MIB if kernel == (6, 6) else mapped < MIB  # the header was mapped before
    file.release()
    assert memory_bytes()[1] - before < MIB


def test_reading_copies_nothing_and_the_file_cannot_be_changed_through_it(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4)}, path)
    before = path.read_bytes()
    file = TensorFile(path)
    assert file.tensor("a").data_ptr() == file.tensor("a").data_ptr()
    file.tensor("a").zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BundleError, match=r"x\.safetensors"):
        TensorFile(path)


def test_a_missing_tensor_is_named(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    with pytest.raises(BundleError, match="no tensor 'q'; it has a"):
        TensorFile(tmp_path / "x.safetensors").tensor("q")
