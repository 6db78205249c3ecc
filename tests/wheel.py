"""Does what ``make wheel`` made work where there is no checkout and no compiler?

Installs the wheel into a fresh environment, tries the README's first steps there, then does the
same with the sdist, built once without a compiler and once with one. ::

    python tests/wheel.py dist                                 with torch from the package index
    python tests/wheel.py --python /usr/bin/python3.13 dist    with another Python
    python tests/wheel.py --environment ENV dist               in one that has torch already
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("paceline")  # known without an import
total = torch.ones(3)
dist.all_reduce(total)
print(dist.group.WORLD.backend, int(total.sum()))
dist.destroy_process_group()
"""
NO_COMPILER = {"CC": "/no/compiler/here"}


def main() -> None:
    """Try both; the first thing that is not as it should be ends it with an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--environment", type=Path)
    asked = parser.parse_args()
    (wheel,) = asked.dist.resolve().glob("*.whl")
    (sdist,) = asked.dist.resolve().glob("*.tar.gz")
    check_tag(wheel)
    with tempfile.TemporaryDirectory(prefix="paceline-wheel-") as folder:
        home = Home(Path(folder), asked.environment or make(Path(folder), asked))
        home.install(wheel, **NO_COMPILER)
        home.check("the wheel", engine="shm", demo=True)
        home.install(sdist, **NO_COMPILER)
        home.check("the sdist without a compiler", engine="gloo")
        if shutil.which("cc"):
            home.install(sdist)
            home.check("the sdist", engine="shm")


def check_tag(wheel: Path) -> None:
    """The name of a wheel promises a glibc; the linker's own words say which one is needed."""
    promised = re.search(r"-py3-none-manylinux_(\d+)_(\d+)_", wheel.name)
    assert promised, wheel.name
    if not shutil.which("objdump"):
        return say("objdump is not here: the tag was not compared with what the library needs")
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        library = Path(folder, "paceline/_transport/_shm.so")
        symbols = call(["objdump", "-T", library], cwd=Path(folder)).stdout
    needed = max(tuple(map(int, v)) for v in re.findall(r"\(?GLIBC_(\d+)\.(\d+)", symbols))
    assert needed <= tuple(map(int, promised.groups())), (needed, wheel.name)
    return say(f"{wheel.name} needs glibc {needed[0]}.{needed[1]}")


def make(folder: Path, asked: argparse.Namespace) -> Path:
    """A fresh environment with torch in it, which takes a minute or two."""
    call([asked.python, "-m", "venv", "env"], cwd=folder)
    pip(folder / "env", asked.torch)
    pip(folder / "env", "setuptools>=77,<82", "wheel")
    return folder / "env"


class Home:
    """An environment, and a folder that is no checkout."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder, self.environment = folder, environment.resolve()

    def install(self, package: Path, **env: str) -> None:
        """Put ``package`` in the place of what was installed before."""
        options = ["--force-reinstall", "--no-build-isolation", "--no-deps"]
        pip(self.environment, *options, str(package), **env)
        pip(self.environment, str(package), "--no-build-isolation", **env)  # what it depends on

    def check(self, what: str, engine: str, demo: bool = False) -> None:
        """Import it, reduce over two ranks, ask each command for something."""
        where = self("python", "-c", "import paceline; print(paceline.__file__)").stdout
        assert str(self.environment) in where, where
        (self.folder / "train.py").write_text(SCRIPT)
        out = self("paceline", "run", "--nproc", "2", "train.py").stdout
        assert sorted(out.split("\n")) == ["", f"[0] {engine} 6", f"[1] {engine} 6"], out
        assert "paceline demo" in self("paceline", "demo", "--help").stdout
        if demo:
            self("paceline", "demo", "--steps", "5", "--nproc", "2", "--no-compare")
            assert (self.folder / "paceline-demo" / "report.html").exists()
            self("paceline", "demo", "--chaos", "--steps", "20", "--nproc", "2")
        bench = self("paceline", "bench", code=2)
        assert "checkout" in bench.stderr, bench.stderr
        version = self("python", "--version").stdout.strip()
        say(f"{what} works with {version}: two ranks over {engine}")

    def __call__(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        program = self.environment / "bin" / command[0]
        return call([program, *command[1:]], cwd=self.folder, code=code)


def pip(environment: Path, *arguments: str, **env: str) -> None:
    quiet = ["-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-compile"]
    call([environment / "bin/python", *quiet, *arguments], cwd=Path("/"), **env)


def call(
    command: list[str | Path], cwd: Path, code: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; an error with all it wrote if it ends otherwise than with ``code``."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=1800, check=False
    )
    words = " ".join(map(str, command))
    assert ran.returncode == code, f"{words}: {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
