import json

import pytest
import torch
from safetensors import safe_open

from runtime.errors import BundleError
from runtime.sample_store import SampleIdentity, SampleStore, SampleStoreWriter, quantise_per_token, sample_order

TOKENS, WIDTH = 4, 8


def identity(index: int) -> SampleIdentity:
    return SampleIdentity(
        index=index,
        photo=f"größe {index}.jpg",
        photo_sha256="0" * 64,
        crop=(index, 0, 64, index % 2),
        prompt=f"prompt {index % 2}",
        sigma=(index + 1) / 100,
        timestep=10.0 * (index + 1),
        seed=index * 7,
    )


def tensors_of(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {name: torch.randn(TOKENS, WIDTH, generator=generator) for name in ("hidden", "tail_residual")} | {
        "modulation": torch.full((6, WIDTH), float(index))
    }


def write_store(path, indices, dtype=torch.float32):
    specs = {name: (dtype, (TOKENS, WIDTH)) for name in ("hidden", "tail_residual")}
    specs["modulation"] = (torch.float32, (6, WIDTH))
    prompts = {"context": torch.stack([torch.zeros(3, WIDTH), torch.ones(3, WIDTH)])}
    writer = SampleStoreWriter(path, [identity(i) for i in indices], [i % 2 for i in indices], specs, prompts)
    with writer:
        for index in reversed(indices):
            writer.write(index, tensors_of(index), base_loss=index / 10)
    return writer


def test_a_record_comes_back_with_its_identity_whatever_the_order(tmp_path):
    write_store(tmp_path / "a.safetensors", list(range(12)))
    store = SampleStore([tmp_path / "a.safetensors"])
    order = [next(o) for o in [sample_order(12, 3)] for _ in range(30)]
    for index in order:
        sample = store.read(index)
        assert sample.identity == identity(index)
        assert sample.base_loss == pytest.approx(index / 10)
        for name, value in tensors_of(index).items():
            assert torch.equal(sample.tensors[name], value), name
        assert torch.equal(sample.tensors["context"], torch.full((3, WIDTH), float(index % 2)))


def test_shards_make_one_pool_and_a_missing_shard_is_found(tmp_path):
    write_store(tmp_path / "even.safetensors", [0, 2, 4])
    write_store(tmp_path / "odd.safetensors", [1, 3])
    store = SampleStore([tmp_path / "odd.safetensors", tmp_path / "even.safetensors"])
    assert len(store) == 5
    assert [store.read(i).identity.index for i in range(5)] == list(range(5))
    with pytest.raises(BundleError, match="shard is missing"):
        SampleStore([tmp_path / "even.safetensors"])


def test_the_shard_is_a_safetensors_file(tmp_path):
    write_store(tmp_path / "a.safetensors", [0, 1, 2], torch.bfloat16)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.get_tensor("sample.hidden").dtype == torch.bfloat16
        assert file.get_tensor("sample.hidden").shape == (3, TOKENS, WIDTH)
        assert len(json.loads(file.metadata()["records"])) == 3


@pytest.mark.parametrize("name", ["sample.hidden", "sample.modulation", "prompt.context"])
def test_an_altered_or_exchanged_record_is_found(tmp_path, name):
    path = tmp_path / "a.safetensors"
    write_store(path, [0, 1, 2])
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start, end = header[name]["data_offsets"]
    offset = 8 + int.from_bytes(data[:8], "little")
    rows = 2 if name.startswith("prompt") else 3
    size = (end - start) // rows
    # Two records exchange this tensor: each file part is valid, only the pairing is wrong.
    first = slice(offset + start, offset + start + size)
    second = slice(offset + start + size, offset + start + 2 * size)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    store = SampleStore([path])
    with pytest.raises(BundleError, match="CRC"):
        store.read(0)


def test_int8_errors_stay_within_half_a_step_and_are_reported(tmp_path):
    writer = write_store(tmp_path / "a.safetensors", [0, 1], torch.int8)
    store = SampleStore([tmp_path / "a.safetensors"])
    for index in (0, 1):
        exact = tensors_of(index)["hidden"]
        _, scale = quantise_per_token(exact)
        assert ((store.read(index).tensors["hidden"] - exact).abs() <= scale / 2 + 1e-6).all()
    errors = writer.relative_errors()
    assert 0 < errors["hidden"] < 0.01
    assert errors["modulation"] == 0


def test_a_write_that_fails_leaves_nothing(tmp_path):
    writer = SampleStoreWriter(tmp_path / "a.safetensors", [identity(0)], [0], {"hidden": (torch.float32, (2,))}, {})
    with pytest.raises(RuntimeError, match="planned"), writer:
        raise RuntimeError("planned")
    assert list(tmp_path.iterdir()) == []


def test_the_order_visits_each_sample_once_a_pass_and_matches_the_other_language():
    order = sample_order(7, seed=5)
    passes = [[next(order) for _ in range(7)] for _ in range(3)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1]
    # The first outputs of SplitMix64 seeded with 0 are published with the algorithm; they drive this permutation.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = list(range(4))
    for last, output in zip((3, 2, 1), outputs, strict=True):
        chosen = output % (last + 1)
        expected[last], expected[chosen] = expected[chosen], expected[last]
    other = sample_order(4, seed=0)
    assert [next(other) for _ in range(4)] == expected
