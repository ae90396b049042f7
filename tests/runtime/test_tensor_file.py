import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import BundleError
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
