"""One process under the limits, from its start to its end: watches it, gates its memory, strikes it with faults.

Starts `python -m host.emulator.process`, speaks its protocol, fills a Recorder.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from host.emulator import faults as kinds
from host.emulator.cgroups import UNLIMITED, CgroupV2Scope, Counters, LimitRefusedError
from host.emulator.faults import Fault
from host.emulator.limits import Group
from host.emulator.machine import Machine
from host.emulator.observe import alive, anonymous_bytes, flash_bytes, memory_of, tree
from host.emulator.recorder import Recorder, place_fields
from host.emulator.status import Place, StatusPage
from runtime.memory import MIB

INTERVAL_S = 0.02
GLANCE_S = 0.002
RAMP_GLANCE_S = 0.0002
"""Between samples it is looked so often how much a process holds, and more often while that grows: what a program allocates,
fills and gives back at once would pass unseen otherwise."""
IDLE_TIMEOUT_S = 300.0
PR_SET_THP_DISABLE = 41
"""Without pages of 2 MiB, as phones have none: with them the same run holds now one more, now one less."""
LIBC = ctypes.CDLL(None)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""As Android's: above 64 KiB each allocation is a map of its own and goes back at once. glibc's threshold wanders, and what a
heap keeps depends on the moment at which threads ask for memory."""


@dataclass(slots=True)
class Outcome:
    """How a process ended."""

    status: str
    """complete, interrupted (by a fault: start again), over, killed, refused or failed."""
    message: str = ""
    breach: dict[str, Any] | None = None
    counters: Counters = field(default=Counters(None, 0, None, None))


class Attempt:
    """One process.

    Attributes:
        started: When the first process of the emulation was told to go.
        kernel_limit: What the kernel holds it to, bytes; None if it does not.
    """

    def __init__(
        self,
        *,
        spec: dict[str, Any],
        group: Group,
        machine: Machine,
        recorder: Recorder,
        faults: list[Fault],
        started: float | None,
        private_budget: int | None,
        total_budget: int | None,
        page_cache_bytes: int | None,
        say: Callable[[str], None],
    ) -> None:
        """Takes what `emulate` made; budgets of None are not held."""
        self._spec, self._group, self._machine, self._recorder = spec, group, machine, recorder
        self._faults, self.started, self._say = faults, started, say
        self._private_budget, self._total_budget = private_budget, total_budget
        self._page_cache_bytes = page_cache_bytes
        self.kernel_limit: int | None = None
        self._limited = page_cache_bytes is not None
        self._status = StatusPage()
        self._outcome: Outcome | None = None
        self._ended: dict[str, Any] | None = None
        self._struck: Fault | None = None
        self._slow_until: float | None = None
        self._step_s = 0.0
        self._glanced = self._last_glance = 0
        self._glanced_place = self._status.read()
        self._pause_s = GLANCE_S

    def run(self) -> Outcome:
        """Starts the process and stays with it until it is gone."""
        with tempfile.TemporaryFile() as errors:
            process = self._start(errors)
            try:
                self._group.adopt(process.pid)
                kills = self._group.counters().oom_kills if self._limited else 0
                self._watch(process)
            finally:
                self._end(process)
                self._status.close()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
        return self._judge(process.returncode, kills, said)

    def _start(self, errors: Any) -> "subprocess.Popen[bytes]":
        self._group.limit_memory(UNLIMITED)  # the imports of a process that starts again are not training
        self._machine.limit(False)
        entrances = [os.open(path, os.O_WRONLY) for path in self._group.entrances()]

        def join() -> None:
            for entrance in entrances:  # before it has any memory: what was charged elsewhere stays charged there
                os.write(entrance, b"0")
            LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

        prefix = self._group.command() if isinstance(self._group, CgroupV2Scope) else []
        spec = json.dumps(self._spec | {"status_descriptor": self._status.descriptor})
        try:
            return subprocess.Popen(
                [*prefix, sys.executable, "-m", "host.emulator.process", spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | ALLOCATOR,
                pass_fds=(self._status.descriptor,),
                preexec_fn=join,
                start_new_session=True,  # Ctrl-C is the emulator's to handle
            )
        finally:
            for entrance in entrances:
                os.close(entrance)

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        out, rest = process.stdout.fileno(), b""
        next_sample, idle_by = float("inf"), time.monotonic() + IDLE_TIMEOUT_S
        while True:
            now = time.monotonic()
            pause = 1.0 if next_sample == float("inf") else min(self._pause_s, next_sample - now)
            ready, _, _ = select.select([out], [], [], max(0.0, pause))
            if ready:
                data = os.read(out, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] == "idle":
                        if not self._go(process):
                            return
                        next_sample = time.monotonic()
                    else:
                        self._handle(process, event)
            now = time.monotonic()
            if now >= next_sample or (next_sample < float("inf") and self._glance(process.pid)):
                if not self._sample(process.pid):
                    return
                next_sample = max(next_sample + INTERVAL_S, time.monotonic())
            elif next_sample == float("inf") and now > idle_by:
                self._outcome = Outcome("failed", f"The process was not ready after {IDLE_TIMEOUT_S:.0f} s.")
                return

    def _go(self, process: "subprocess.Popen[bytes]") -> bool:
        """Sets the limits and lets the process begin; false if it is over the budget already."""
        idle = memory_of(self._pids(process.pid))
        self._recorder.start_process(idle, self._group.counters().anon_bytes)
        budget_mib = None
        if self._limited:
            page_cache = self._page_cache_bytes or 0
            if self._total_budget is not None:
                self._private_budget, limit = self._total_budget - idle.private_bytes, self._total_budget
            else:
                assert self._private_budget is not None
                limit = idle.private_bytes + idle.file_bytes + self._private_budget + page_cache
            self._sample(process.pid)
            if self._outcome is not None:
                return False
            try:
                self._group.limit_memory(limit)
            except LimitRefusedError:
                self._breach("kernel", idle.private_bytes, self._status.read())
                return False
            self.kernel_limit = limit if "memory" in self._group.controllers else None
            self._machine.limit()
            budget_mib = -(-self._private_budget // MIB)  # the runtime counts in whole MiB; the gate here is exact
        self.started = self.started or time.monotonic()
        self._order(process, budget_mib=budget_mib)
        return True

    def _pids(self, root: int) -> list[int]:
        return sorted({*tree(root), *self._group.pids()})

    def _seconds(self) -> float:
        return time.monotonic() - self.started if self.started is not None else 0.0

    def _glance(self, root: int) -> bool:
        """Looks at one number of the process; true if that alone is above the budget."""
        held = anonymous_bytes(root)
        self._pause_s = RAMP_GLANCE_S if held > self._last_glance else GLANCE_S
        self._last_glance = held
        if held > self._glanced:
            self._glanced, self._glanced_place = held, self._status.read()
        return self._private_budget is not None and held - self._recorder.idle.private_bytes > self._private_budget

    def _sample(self, root: int) -> bool:
        """Takes a sample and gates it; false ends the watch."""
        pids = self._pids(root)
        for pid in pids:
            self._recorder.traffic(pid, *flash_bytes(pid))
        if not alive(root):
            return True  # its last lines are still to be read
        place, memory = self._status.read(), memory_of(pids)
        if len(pids) == 1 and self._glanced > memory.private_bytes:  # pages of a fork would count twice
            memory, place = replace(memory, private_bytes=self._glanced), self._glanced_place
        self._glanced = 0
        if memory.private_bytes == 0:
            return True
        private = self._recorder.sample(self._seconds(), memory, self._group.counters(), place)
        if not self._limited:
            return True
        if self._slow_until is not None and time.monotonic() > self._slow_until:
            self._machine.slow_flash(1.0)
            self._slow_until = None
        self._machine.heat(self._seconds())
        budget = self._private_budget
        if budget is not None and private > budget:
            self._breach("sampler", private, place)
            return False
        return True

    def _breach(self, by: str, private: int, place: Place) -> None:
        held = f"{private / MIB:.1f} MiB of private memory beyond idle"
        if by == "kernel":
            status, text = (
                "killed",
                f"The kernel ended the process at its limit, in {place}; the last sample had {held}.",
            )
        else:
            status, text = (
                "over",
                f"In {place} it held {held}, the budget is {(self._private_budget or 0) / MIB:.1f} MiB.",
            )
        if self._total_budget is not None and place.phase == "idle":
            status = "over"
            idle = self._recorder.idle.private_bytes / MIB
            text = (
                f"In {place} the interpreter and its libraries alone held {idle:.1f} MiB, the "
                f"budget is {self._total_budget / MIB:.0f} MiB in all. Nothing was trained; raise --budget-total."
            )
        self._outcome = Outcome(status, text, self._breach_fields(by, private, place))

    def _breach_fields(self, by: str, private: int, place: Place) -> dict[str, Any]:
        """A breach as emulation.json has it."""
        return {"seconds": self._seconds(), **place_fields(place), "private_bytes": private, "by": by}

    @property
    def _last_private(self) -> int:
        return self._recorder.samples[-1][1] if self._recorder.samples else 0

    def _handle(self, process: "subprocess.Popen[bytes]", event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "start":
            self._recorder.planned_private_bytes = event["planned_private_bytes"]
        elif kind == "writes":
            self._recorder.writing(process.pid, event["phase"], event["written_bytes"])
        elif kind == "step":
            self._recorder.step(self._seconds(), event["row"], event["cpu_seconds"])
            self._step_s = event["row"]["step_ms"] / 1e3
            self._say_step(event["row"])
            fault = self._pending
            if fault is not None and event["row"]["step"] > fault.step:
                fault.recovered = fault is not self._struck or fault.kind not in kinds.ENDS_PROCESS
            if self._spec["lockstep"]:
                self._strike(process, event["row"]["step"])
        elif kind == "end":
            self._ended = event
        elif kind == "error":
            self._ended = event | {"status": "error"}

    def _say_step(self, row: dict[str, Any]) -> None:
        if self._limited:
            held = self._recorder.peak.get("private_bytes", 0) / MIB
            self._say(f"step {row['step']} | loss {row['loss']:.4f} | {row['step_ms']:.0f} ms | peak {held:.0f} MiB")

    @property
    def _pending(self) -> Fault | None:
        """The fault that has struck, in this process or the one before, and is not yet overcome."""
        return next((fault for fault in self._faults if fault.seconds is not None and not fault.recovered), None)

    def _strike(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        """Answers a step, with a fault if one is due and the one before is over."""
        fault = next((each for each in self._faults if each.seconds is None), None)
        if self._pending is not None or fault is None or step < fault.step:
            self._order(process)
            return
        self._struck, fault.step, fault.seconds = fault, step, round(self._seconds(), 3)
        order: dict[str, Any] = dict(kinds.ORDERS.get(fault.kind, {}))
        if fault.kind == "slow-read":
            rate = self._machine.slow_flash(kinds.SLOW_SHARE)
            self._machine.drop_page_cache(again=True)
            self._slow_until = time.monotonic() + kinds.SLOW_SECONDS
            fault.detail = f"flash reads at {rate / 1e6:.0f} MB/s for {kinds.SLOW_SECONDS:g} s, page cache dropped"
            if not self._machine.kernel_throttles:
                order = {"read_bytes_per_s": rate}
                fault.detail = f"flash reads at {rate / 1e6:.0f} MB/s from here on, page cache dropped"
        elif fault.kind == "thermal":
            fault.detail = self._machine.overheat()
        self._order(process, **order)
        if fault.kind == "kill":
            time.sleep(fault.moment * self._step_s)
            place = self._status.read()
            self._kill(process.pid)
            fault.detail = f"SIGKILL in {place}"

    def _judge(self, code: int, kills: int, said: str) -> Outcome:
        """How it ended."""
        counters = self._group.counters() if self._limited else Counters(None, 0, None, None)
        outcome = self._outcome or self._how(code, kills, counters, said)
        outcome.counters = counters
        return outcome

    def _how(self, code: int, kills: int, counters: Counters, said: str) -> Outcome:
        ended, fault = self._ended, self._struck
        # A scope of systemd's is gone with its process, and with it the count.
        uncounted = isinstance(self._group, CgroupV2Scope) and code == -signal.SIGKILL and fault is None
        if counters.oom_kills > kills or uncounted:
            self._breach("kernel", self._last_private, self._last_place)
            assert self._outcome is not None
            return self._outcome
        if fault is not None and fault.kind in kinds.ENDS_PROCESS:
            if ended is not None and ended["status"] == "stopped":
                fault.detail = f"asked to pause; state saved at the end of step {fault.step}"
                return Outcome("interrupted", f"{fault.kind} after step {fault.step}: {fault.detail}")
            if ended is not None and ended["status"] == "error" and ended["kind"] == "StorageFullError":
                fault.detail = ended["message"]
                return Outcome("interrupted", f"{fault.kind} after step {fault.step}: {fault.detail}")
            if ended is None and (fault.kind, code) in (("kill", -signal.SIGKILL), ("failing-read", -signal.SIGBUS)):
                if fault.kind == "failing-read":
                    fault.detail = f"a page of the weights could not be read: SIGBUS in {self._last_place}"
                return Outcome("interrupted", f"{fault.kind} after step {fault.step}: {fault.detail}")
        if ended is not None and ended["status"] == "complete" and code == 0:
            if fault is not None and fault.kind not in kinds.ENDS_PROCESS:
                fault.recovered = True
            return Outcome("complete")
        if ended is not None and ended["status"] == "error":
            if ended["kind"] == "BudgetExceededError":
                fields = self._breach_fields("runtime", self._last_private, self._last_place)
                return Outcome("over", f"The runtime itself stopped: {ended['message']}", fields)
            if ended["refused"]:
                return Outcome("refused", ended["message"])
            return Outcome("failed", f"In {self._last_place}: {ended['kind']}: {ended['message']}")
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        tail = f" It said: {said.splitlines()[-1]}" if said else ""
        return Outcome("failed", f"The process ended in {self._last_place} with {how}.{tail}")

    def _order(self, process: "subprocess.Popen[bytes]", **values: Any) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()

    def _kill(self, root: int) -> None:
        for pid in self._pids(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends whatever is left of the tree and reads how the process ended."""
        if self._outcome is not None or self._ended is None:
            self._kill_if_running(process)
        if not _ends(process, 10.0):
            self._kill(process.pid)
            _ends(process, 10.0)
        self._recorder.traffic(process.pid, *flash_bytes(process.pid))  # dead, and counted until someone waits for it
        self._recorder.end_process()
        process.wait()
        self._last_place = self._status.read()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _kill_if_running(self, process: "subprocess.Popen[bytes]") -> None:
        if self._outcome is None:  # the lines have ended, so the process is about to; its status says why
            _ends(process, 2.0 if sys.exc_info()[0] is None else 0.0)
        self._kill(process.pid)


def _ends(process: "subprocess.Popen[bytes]", patience_s: float) -> bool:
    """Waits until a process is dead, without taking its entry from the system."""
    end = time.monotonic() + patience_s
    while alive(process.pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
