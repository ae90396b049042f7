"""This machine made into the phone: cores, CPU quota, heat, flash bandwidth; what of that could be had and what not.

Uses the controllers of the group and the profile; writes nothing.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from host.emulator.device import Device
from host.emulator.limits import Group, block_device, cores_text
from host.emulator.observe import drop_page_cache
from runtime.manifest import BundleManifest

GIGA = 1e9
FAST = ("big", "mid")
THERMAL_INTERVAL_S = 1.0


class Machine:
    """The limits that are not memory.

    Attributes:
        host_gflops: fp32 GFLOP a CPU second of this machine.
        affinity: CPUs the process may use.
        throttle: Arguments of the throttled reader; None where the kernel throttles.
        read_bytes_per_s: Of the flash now.
    """

    def __init__(self, bundle: Path, manifest: BundleManifest, device: Device, group: Group) -> None:
        """Measures this machine and sees what the group has."""
        self._device, self._group = device, group
        self._files = [bundle / name for name in manifest.files]
        available = sorted(os.sched_getaffinity(0))
        fast = sum(core.count for core in device.cores if core.cluster in FAST) or sum(
            core.count for core in device.cores
        )
        self.affinity = available[: max(1, min(len(available), fast))]
        self.host_gflops = _host_gflops()
        self._wanted_cores = sum(device.usable_gflops) / 2 / self.host_gflops
        self._hot, self._checked = False, 0.0
        self._dropped = False
        self._disk = block_device(bundle) if {"blkio", "io"} & set(group.controllers) else None
        self.read_bytes_per_s = device.flash.read_bytes_per_s
        self.throttle: dict[str, float] | None = None
        self._notes: list[str] = []
        self._try_kernel_throttle()

    def _try_kernel_throttle(self) -> None:
        flash = self._device.flash
        why = self._group.missing.get("blkio") or self._group.missing.get("io") or "no controller for block devices"
        if {"blkio", "io"} & set(self._group.controllers):
            why = "the bundle lies on a file system without a block device of its own"
        if self._disk is not None:
            try:
                self._group.limit_flash(self._disk, flash.read_bytes_per_s, flash.write_bytes_per_s)
                return
            except OSError as error:
                why, self._disk = (error.strerror or str(error)).lower(), None
        self.throttle = {
            "read_bytes_per_s": flash.read_bytes_per_s,
            "write_bytes_per_s": flash.write_bytes_per_s,
            "latency_us": flash.latency_us,
        }
        self._notes.append(
            f"The kernel does not slow the flash ({why}): reads and writes wait inside the process instead."
        )

    @property
    def kernel_throttles(self) -> bool:
        """Whether the kernel limits the flash."""
        return self._disk is not None

    def limit(self, limited: bool = True) -> None:
        """Sets, or lifts, the limits of CPU and flash."""
        self._checked = 0.0
        if "cpu" in self._group.controllers:
            self._group.limit_cpu(self._cores(0.0) if limited else None)
        if self._disk is not None:
            flash = self._device.flash
            rates = (self.read_bytes_per_s, flash.write_bytes_per_s) if limited else (None, None)
            self._group.limit_flash(self._disk, *rates)

    def heat(self, seconds: float) -> None:
        """Follows the thermal curve, once a second."""
        now = time.monotonic()
        if "cpu" in self._group.controllers and now - self._checked >= THERMAL_INTERVAL_S:
            self._checked = now
            self._group.limit_cpu(self._cores(seconds))

    def overheat(self) -> str:
        """Takes the CPU to the end of the thermal curve for good; returns what that means."""
        self._hot = True
        share = self._device.thermal[-1][1]
        if "cpu" not in self._group.controllers:
            return f"the phone is hot, {share:.0%} of its speed; not imposed: no CPU limit to be had"
        cores = self._cores(0.0)
        assert cores is not None
        self._group.limit_cpu(cores)
        return f"the phone is hot, {share:.0%} of its speed: {cores_text(cores)}"

    def slow_flash(self, share: float) -> float:
        """Sets the reading bandwidth to a share of the profile's and returns it."""
        self.read_bytes_per_s = share * self._device.flash.read_bytes_per_s
        if self._disk is not None:
            self._group.limit_flash(self._disk, self.read_bytes_per_s, self._device.flash.write_bytes_per_s)
        return self.read_bytes_per_s

    def drop_page_cache(self, again: bool = False) -> None:
        """Puts the bundle out of the page cache; `again` while it is in use, when some pages stay."""
        dropped = drop_page_cache(self._files)
        self._dropped = self._dropped if again else dropped

    def _cores(self, seconds: float) -> float | None:
        """What the process may use by now, in cores; None if all of them is less than the phone has."""
        share = self._device.thermal[-1][1] if self._hot else self._device.speed_share(seconds)
        cores, most = self._wanted_cores * share, float(len(self.affinity))
        if self._hot:
            return min(cores, most * share)
        return cores if cores < most else None

    def flash_limits(self) -> dict[str, float]:
        """For emulation.json."""
        flash = self._device.flash
        return {
            "read_limit": flash.read_bytes_per_s,
            "write_limit": flash.write_bytes_per_s,
            "latency_us": flash.latency_us,
        }

    def enforcement(self) -> dict[str, Any]:
        """What is imposed, by what, and what is weaker than on the phone."""
        group, notes = self._group, list(self._notes)
        if "memory" not in group.controllers:
            notes.insert(
                0,
                f"The kernel holds no limit ({group.missing['memory']}): memory is sampled every 20 ms and the run ended when "
                "over. Shorter peaks pass unseen.",
            )
        cpu = group.version if "cpu" in group.controllers else "none"
        cores, most = self._wanted_cores, len(self.affinity)
        speed = f"{sum(self._device.usable_gflops) / 2:.0f} GFLOP/s of the phone, {self.host_gflops:.0f} a core here"
        if cpu == "none":
            why = group.missing.get("cpu", "no controller")
            notes.append(
                f"The CPU's speed is not limited ({why}), only its cores, to {most}: step times are this machine's."
            )
        elif cores < most:
            notes.append(f"The CPU has {cores_text(cores)} of {most}, less when the phone is hot ({speed}).")
        else:
            notes.append(f"The CPU is not slowed down: {cores_text(most)} here are no faster than the phone ({speed}).")
        if self.kernel_throttles:
            notes.append("The kernel limits the flash's bandwidth, not its latency; this machine's own may be slower.")
        if not self._dropped:
            notes.append("The page cache could not be dropped: part of the bundle was not read from flash.")
        flash = {"cgroup v1": "blkio", "cgroup v2": "io.max"}.get(group.version) if self.kernel_throttles else None
        return {
            "memory": group.version,
            "cpu": cpu,
            "cpu_cores": cores if cpu != "none" and cores < most else None,
            "flash": flash or "throttled reader",
            "notes": notes,
            "page_cache_dropped": self._dropped,
        }


def _host_gflops() -> float:
    """Of one core: in a process of its own, since threads of a product that wait for each other burn CPU time too."""
    code = "from host.emulator.projection import measure_host_gflops as measure; print(measure())"
    environment = os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
