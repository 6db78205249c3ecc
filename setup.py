"""Builds shm.c and names the wheel; everything else about the package is in pyproject.toml.

The result is a plain shared library that ``paceline._transport`` opens through ctypes. It knows
neither Python's headers nor torch's, so one build serves every version of both: the wheel is
tagged ``py3-none-manylinux_2_N``, where 2.N is the glibc that the library was found to need. A
machine that cannot build it gets the package without it.
"""

import hashlib
import platform
import re
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

FOLDER = "src/paceline/_transport"
SOURCES = sorted(glob(f"{FOLDER}/*.[ch]"))


def source_hash() -> str:
    """The C text as a number: ranks whose libraries come from other texts must not share memory."""
    text = b"\0".join(Path(name).read_bytes() for name in SOURCES)
    return f"0x{hashlib.sha256(text).hexdigest()[:16]}ULL"


class BuildLibrary(build_ext):
    """Builds a library for ctypes where setuptools expects an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))  # no ABI tag in the name

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # there is no PyInit function

    def build_extension(self, ext: Extension) -> None:
        try:
            if sys.platform != "linux":
                raise PlatformError("it needs Linux")
            super().build_extension(ext)
        except Exception as error:  # whatever went wrong, the rest of the package works
            self._drop(ext)
            reason = " ".join(str(error).split())
            self.warn(f"paceline is installed without its shared-memory library: {reason}")

    def _drop(self, ext: Extension) -> None:
        """Remove what an earlier build left: it does not belong to today's source."""
        name = self.get_ext_filename(ext.name)
        Path(self.build_lib, name).unlink(missing_ok=True)
        if self.editable_mode:
            Path("src", name).unlink(missing_ok=True)


class NameWheel(bdist_wheel):
    """Tags the wheel by what the library in it needs."""

    def get_tag(self) -> tuple[str, str, str]:
        name = "paceline/_transport/_shm.so"
        library = Path(self.get_finalized_command("build_ext").build_lib, name)
        platform_tag = super().get_tag()[2]
        if library.exists() and (needed := glibc_needed(library)):
            platform_tag = f"manylinux_{needed[0]}_{needed[1]}_{platform.machine()}"
        return "py3", "none", platform_tag


def glibc_needed(library: Path) -> tuple[int, int]:
    """The oldest glibc that has all the symbols a library asks for; (0, 0): it asks for none.

    A library names the versions it needs in its table of strings.
    """
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    versions = {(int(major), int(minor)) for major, minor in found}
    return max(versions | {(2, 17)}) if versions else (0, 0)  # no manylinux tag is older than 2.17


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": NameWheel},
    ext_modules=[
        Extension(
            "paceline._transport._shm",
            [f"{FOLDER}/shm.c"],
            depends=SOURCES,
            define_macros=[("PACELINE_SOURCE", source_hash())],
            optional=True,
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fvisibility=hidden",
                "-fwrapv",  # integer sums wrap around, as torch's do
                "-fno-math-errno",
                "-ffp-contract=off",  # same sums whether or not the processor can fuse them
                "-Wall",
                "-Wextra",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
        )
    ],
)
