import pytest

from host.config import read_tables, resolve
from runtime.errors import SchemaError


def test_overrides_lie_on_the_file_and_keep_toml_types(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[export]\nsamples = 7\nprompt = "from file"\n[train]\nsteps = 3\n')
    overrides = ["export.samples=9", "export.cut=[1, 2]", "export.model=some/model", "train.learning_rate=1e-3"]
    config = resolve(read_tables(path, overrides), "c.toml")
    assert (config.export.samples, config.export.cut, config.export.model) == (9, (1, 2), "some/model")
    assert config.export.prompt == "from file"
    assert (config.train.steps, config.train.learning_rate) == (3, 1e-3)


def test_all_unknown_keys_and_refused_values_are_reported_together():
    tables = read_tables(None, ["export.smaples=1", "trian.steps=2", "generate.steps=0", "export.flip_probability=2"])
    with pytest.raises(SchemaError) as error:
        resolve(tables, "settings")
    for part in ("'export.smaples'", "'trian'", "generate: steps: got 0", "settings"):
        assert part in str(error.value)


@pytest.mark.parametrize("override", ["samples=1", "export.samples", "export.=1", "=1"])
def test_an_override_of_another_form_is_refused_with_the_right_one(override):
    with pytest.raises(SchemaError, match=r"expected section\.key=value"):
        read_tables(None, [override])


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[export\nx=1")
    with pytest.raises(SchemaError, match=r"broken\.toml: cannot be read as TOML"):
        read_tables(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("export.samples=0", "samples: got 0"),
        ("export.cut=[-1, 2]", "cut: got"),
        ("export.cut=[1]", "a list of 2"),
        ("export.lora_targets=[]", "at least one layer"),
        ("export.background=[0, 0, 300]", "0 to 255"),
        ("export.sample_dtype=fp8", "one of 'bf16', 'int8', 'fp32'"),
        ("export.image_side=0", "image_side: got 0, expected at least 1 pixel"),
        ("export.patch_side=0", "patch_side: got 0"),
        ("generate.image_side=0", "image_side: got 0"),
        ("generate.seeds=[]", "at least one"),
        ("train.beta1=1", "expected 0 <= beta1 < 1"),
    ],
)
def test_values_out_of_range_are_refused(override, message):
    with pytest.raises(SchemaError) as error:
        resolve(read_tables(None, [override]), "settings")
    assert message in str(error.value)
