import json

import pytest

from runtime.errors import StorageFullError
from runtime.metrics import MetricsWriter, read_metrics


def test_a_row_that_finds_no_space_is_an_error_that_says_so_and_the_rows_before_stay(tmp_path):
    log = MetricsWriter(tmp_path, resume_step=0)
    log.write({"step": 1})
    log._file.close()
    log._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(StorageFullError, match=r"metrics\.jsonl was not written: the storage is full"):
        log.write({"step": 2})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_half_a_row_is_cut_off_by_the_next_run(tmp_path):
    log = MetricsWriter(tmp_path, resume_step=0)
    for step in (1, 2):
        log.write({"step": step})
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": 3})[:5])
    MetricsWriter(tmp_path, resume_step=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
