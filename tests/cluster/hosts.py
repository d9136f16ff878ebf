"""Hosts on one machine: network, process and mount namespaces with an sshd, joined by a bridge.

Each host has a home, a /tmp, a /run and a /dev/shm of its own; all else is this machine's. `ray
stop` ends what it finds by name, so a host that shares its processes with others would end theirs.
The init of a host reads its standard input and ends with it, and everything on the host ends with
the init: no process stays, whatever ends the test. Wants root, iproute2, openssh, rsync, curl.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = (
    "ip",
    "unshare",
    "nsenter",
    "sshd",
    "ssh-keygen",
    "ssh",
    "rsync",
    "ss",
    "ps",
    "curl",
)
SBIN = "/usr/sbin:/sbin"
HOME = "/run/home"  # of the user of every host, where it is a folder of the host

INIT = """
set -eu
hostname {name}
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd {home}
mount --bind {root}/home {home}
mount --bind {root}/passwd /etc/passwd
for path in {kept}; do mkdir -p {root}$path; mount --bind $path {root}$path; done
mount --rbind {root}/tmp /tmp
ip link set lo up
{sshd}
echo ready
cat > /dev/null
"""
SSHD = """
/usr/sbin/sshd -D -f /dev/null -o HostKey={keys}/host -o AuthorizedKeysFile={keys}/user.pub \
  -o PidFile=none -o UsePAM=no -o StrictModes=no -o PermitRootLogin=prohibit-password \
  -o MaxStartups=100 -o "Subsystem=sftp internal-sftp" &
"""


def missing() -> list[str]:
    """What this machine lacks to make hosts, in words."""
    path = os.environ["PATH"] + ":" + SBIN
    lacks = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    return lacks + (["root"] if os.geteuid() else [])


class Host:
    """One host. `home`: its user's files, as this machine finds them; for the host it is HOME."""

    def __init__(
        self,
        name: str,
        address: str,
        root: Path,
        keys: Path,
        shared_paths: Iterable[Path],
    ):
        self.name, self.address, self.root, self.home = (
            name,
            address,
            root,
            root / "home",
        )
        (root / "tmp").mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        self.home.mkdir()
        users = [f"{user}:x:0:0::{HOME}:/bin/bash" for user in ("root", "ubuntu")]
        others = Path("/etc/passwd").read_text().splitlines()
        others = [line for line in others if not line.startswith(("root:", "ubuntu:"))]
        (root / "passwd").write_text("\n".join(users + others) + "\n")
        shared = " ".join(
            str(path) for path in shared_paths if path.is_relative_to("/tmp")
        )
        sshd = SSHD.format(keys=keys)
        script = INIT.format(name=name, root=root, home=HOME, kept=shared, sshd=sshd)
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child",
             "bash", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout.readline() == "ready\n", f"host {name} did not start"

    @property
    def holder(self) -> int:
        """A process of this machine in the host's network namespace."""
        return self._holder.pid

    @property
    def init(self) -> str:
        """The host's process 1, as this machine numbers it."""
        return (
            Path(f"/proc/{self.holder}/task/{self.holder}/children").read_text().strip()
        )

    def command(self, *command: str) -> list[str]:
        """What runs a command here: with the user's home, none of our environment."""
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin:{SBIN}"
        variables = [f"HOME={HOME}", f"PATH={path}", "TERM=dumb", "LANG=C.UTF-8"]
        inside = ["nsenter", "--target", self.init, "--all"]
        return [*inside, "env", "-i", f"--chdir={HOME}", *variables, *command]

    def run(self, *command: str, timeout: float = 120) -> str:
        """What a command says, standard output and errors together; AssertionError if it fails."""
        done = subprocess.run(
            self.command(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}\n{done.stdout}"
        return done.stdout

    def processes(self) -> list[str]:
        """The command lines of what runs here beside its init, its sshd and this question."""
        listing = self.run("ps", "-eo", "ppid=,args=").splitlines()
        lines = [line.split(maxsplit=1) for line in listing]
        ours = ("sshd", "/usr/sbin/sshd", "cat", "ps -eo", "bash -c \nset -eu")
        return [
            args for ppid, args in lines if ppid != "0" and not args.startswith(ours)
        ]

    def close(self) -> None:
        self._holder.stdin.close()  # type: ignore[union-attr]
        self._holder.wait(10)
        self._holder.stdout.close()  # type: ignore[union-attr]


@dataclass
class Hosts:
    """Some hosts on one network, by name; `keys`: a folder with the key of their user."""

    keys: Path
    by_name: dict[str, Host]

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]


@contextmanager
def joined(addresses: dict[str, str], shared_paths: Iterable[Path]) -> Iterator[Hosts]:
    """Hosts of these names and addresses; `kept`: what of this machine's /tmp they have too."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder)
        keys = folder / "keys"
        keys.mkdir()
        for name in ("user", "host"):
            make = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-f",
                f"{keys}/{name}",
            ]
            subprocess.run(make, check=True)
        switch = stack.enter_context(
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat > /dev/null"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        switch.stdout.readline()
        inside(switch.pid, "ip", "link", "add", "bridge", "type", "bridge")
        inside(switch.pid, "ip", "link", "set", "bridge", "up")
        hosts = Hosts(keys, {})
        for name, address in addresses.items():
            hosts.by_name[name] = host = Host(
                name, address, folder / name, keys, list(shared_paths)
            )
            stack.callback(host.close)
            plug(host, switch.pid)
        yield hosts


def plug(host: Host, switch: int) -> None:
    """A cable from the host to the switch."""
    ends = ["eth0", "netns", str(host.holder)], [host.name, "netns", str(switch)]
    link = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
    subprocess.run(link, check=True)
    inside(switch, "ip", "link", "set", host.name, "master", "bridge", "up")
    inside(host.holder, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    inside(host.holder, "ip", "link", "set", "eth0", "up")


def inside(pid: int, *command: str) -> None:
    """Run a command in the network of a process."""
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], check=True)
