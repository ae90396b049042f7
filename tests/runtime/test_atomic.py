import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from runtime import atomic

WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from runtime import atomic
    number = 0
    while True:
        number += 1
        atomic.write_json(Path(sys.argv[1]), {"number": number, "filler": "x" * 200_000})
        print(number, flush=True)
""")


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "state.json"
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.01 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(json.loads(path.read_text())["filler"]) == 200_000


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temp(tmp_path):
    path = tmp_path / "state.json"
    atomic.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        atomic.write_json(path, {"a": float("nan")})
    with pytest.raises(RuntimeError, match="planned"), atomic.atomic_path(path) as temp:
        temp.write_text("half")
        raise RuntimeError("planned")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
