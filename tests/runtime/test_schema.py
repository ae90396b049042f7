from dataclasses import dataclass, field
from typing import Literal

import pytest

from runtime.errors import SchemaError
from runtime.manifest import TrainingSpec
from runtime.schema import decode, encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    side: int = 3
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    table: dict[str, Inner] = field(default_factory=dict)


def test_what_is_encoded_decodes_to_the_same():
    value = Outer(name="x", mode="b", pair=(1, 2), names=("p", "q"), inner=Inner(side=9), table={"k": Inner()})
    assert decode(Outer, encode(value), "here") == value


def test_all_faults_are_reported_together_with_their_paths():
    data = {"nmae": "x", "mode": "c", "pair": [1], "inner": {"side": 1.5, "shar": 1}, "table": {"k": {"side": True}}}
    with pytest.raises(SchemaError) as error:
        decode(Outer, data, "file.toml")
    message = str(error.value)
    for part in (
        "file.toml",
        "unknown key 'nmae'",
        "missing key 'name'",
        "mode: got 'c'",
        "pair",
        "inner.side",
        "inner.shar",
    ):
        assert part in message
    assert "table.k.side: got True" in message


def test_values_a_dataclass_refuses_are_reported_with_their_table():
    with pytest.raises(SchemaError, match="accumulation: got 0, expected at least 1"):
        decode(TrainingSpec, {"accumulation": 0}, "settings")
    with pytest.raises(SchemaError, match="learning_rate: got inf"):
        decode(TrainingSpec, {"learning_rate": float("inf")}, "settings")


def test_whole_numbers_are_taken_for_floats_and_truth_values_are_not_numbers():
    assert decode(TrainingSpec, {"learning_rate": 1}, "settings").learning_rate == 1.0
    with pytest.raises(SchemaError, match="learning_rate: got True"):
        decode(TrainingSpec, {"learning_rate": True}, "settings")
