"""A Slurm cluster on this machine: a munged, a slurmctld and two slurmd of its own, which end with the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .launched import clean_environment

NODES = ("n1", "n2")
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=600
JobRequeue=1
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_UP_S = 60.0


def why_not() -> str:
    """Why there can be no cluster here; empty where there can."""
    if missing := [name for name in PROGRAMS if _program(name) is None]:
        return f"no {', '.join(missing)} here"
    return "" if os.getuid() == 0 else "slurmd wants to be root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """Two nodes that are idle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = clean_environment(SLURM_CONF=str(folder / "slurm.conf"))

    def said(self, *command: str, cwd: Path | None = None, timeout_s: float = 120) -> str:
        """What a command of Slurm's prints; it must end well."""
        done = self.done(*command, cwd=cwd, timeout_s=timeout_s)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def done(
        self, *command: str, cwd: Path | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Its end."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def submitted(self, script: str, folder: Path, *options: str) -> str:
        """The id of a batch job whose script this is, with its output in ``folder``/out."""
        (folder / "job.sh").write_text("#!/bin/sh\n" + script)
        return self.said(
            "sbatch", "--parsable", "--output", "out", "--open-mode", "append", *options, "job.sh", cwd=folder
        )

    def state(self, job: str) -> str:
        """Such as RUNNING, COMPLETED, CANCELLED, TIMEOUT."""
        return self.said("squeue", "--noheader", "--states", "all", "--job", job, "--format", "%T")

    def wait(self, until: Callable[[], object], timeout_s: float = 120) -> None:
        """Until that is true."""
        deadline_s = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline_s, (self.said("squeue", "--states", "all"), self.logs())
            time.sleep(0.5)

    def wait_for(self, job: str, *states: str, timeout_s: float = 120) -> None:
        """Until ``job`` is in one of ``states``."""
        self.wait(lambda: self.state(job) in states, timeout_s)

    def logs(self) -> str:
        """The last lines of all daemons."""
        return "\n".join(
            f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in self.folder.glob("*.log")
        )


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Up until the end."""
    # A short path: that of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as ends:
        folder = Path(name)
        here = Cluster(folder)
        ports = _free_ports(3)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(), folder=folder, ports=ports, nodes=",".join(NODES)
            )
        )
        here.said(str(_program("mungekey")), "--create", "--keyfile", str(folder / "munge.key"))
        ends.enter_context(
            _daemon(
                here,
                "munged",
                *(
                    "--foreground",
                    "--force",
                    f"--key-file={folder}/munge.key",
                    f"--socket={folder}/munge.socket",
                ),
                *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
                f"--log-file={folder}/munge.log",
            )
        )
        here.wait((folder / "munge.socket").exists)
        ends.enter_context(_daemon(here, "slurmctld", "-D", "-i"))
        for node in NODES:
            ends.enter_context(_daemon(here, "slurmd", "-D", "-N", node, name=f"slurmd-{node}"))
        idle = ["sinfo", "--noheader", "--states", "idle", "--format", "%D"]
        here.wait(lambda: here.done(*idle).stdout.strip() == str(len(NODES)), _UP_S)
        yield here
        here.done("scancel", "--full", "--signal", "KILL", "--user", "root")
        here.done("scancel", "--user", "root")


@contextmanager
def _daemon(here: Cluster, program: str, *options: str, name: str = "") -> Iterator[None]:
    with (here.folder / f"{name or program}.log").open("w") as log:
        process = subprocess.Popen(
            [str(_program(program)), *options], env=here.environment, stdout=log, stderr=log, cwd=here.folder
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
