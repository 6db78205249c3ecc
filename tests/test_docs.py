"""The docs say what is true: their code runs, tables are complete, links lead somewhere.

A page's ``python`` blocks run one by one, each in a namespace of its own, on two processes that
share memory, after the block marked ``<!-- prelude -->`` of ``docs/index.md``, which is what a page
takes for granted. A comment before a block says otherwise::

    <!-- continues -->        the names of the block before are still there
    <!-- as a module -->      a file of tests: imported here, and its tests are called
    <!-- slow -->             runs with the slow tests
    <!-- not run: why -->     cannot run here
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
import paceline.errors
import paceline.testing
from paceline.cli.doctor.facts import BETWEEN_US, OWN
from paceline.groups import capabilities
from paceline.testing import Meeting, spawn_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

DOORS = [
    "paceline",
    "paceline.compiled",
    "paceline.data",
    "paceline.elastic",
    "paceline.ddp",
    "paceline.errors",
    "paceline.groups",
    "paceline.hooks",
    "paceline.join",
    "paceline.metrics",
    "paceline.optim",
    "paceline.recorder",
    "paceline.testing",
]

needs_shm = pytest.mark.skipif(
    not capabilities()["shm"].available, reason=capabilities()["shm"].reason
)


# -- the code in the pages --------------------------------------------------------------------

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^>]*?) -->\n+)?^(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)
_NOTES = ("", "prelude", "continues", "as a module", "slow")


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    line: int
    note: str
    code: str

    @property
    def runs_on_ranks(self) -> bool:
        return self.note in ("", "prelude", "continues", "slow")

    def run(self, names: dict[str, Any]) -> None:
        # as many empty lines before it as in the page, so that tracebacks name the right one
        exec(compile("\n" * self.line + self.code, f"docs/{self.page}", "exec"), names)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.relative_to(DOCS).as_posix(),
            text.count("\n", 0, match.start("code")),
            match["note"] or "",
            inspect.cleandoc("\n" + match["code"]) + "\n",
        )
        for match in _BLOCK.finditer(text)
    ]


def all_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from blocks_of(page)


def prelude() -> Block:
    (block,) = (block for block in all_blocks() if block.note == "prelude")
    return block


def run_blocks(meeting: Meeting, blocks: list[Block], before: Block) -> None:
    """Run blocks on one rank, in their order."""
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        if block.note != "continues":
            wait_for_all(meeting, number)  # rank 0 holds the store, which others may still read
            close(names)
            meet_afresh(meeting, number)
            torch.manual_seed(meeting.rank)
            sys.modules["__docs__"] = page = types.ModuleType("__docs__")  # the compiler looks
            names = vars(page)
            before.run(names)
        if block.note != "prelude":
            block.run(names)
    close(names)


def wait_for_all(meeting: Meeting, number: int) -> None:
    """Until all ranks have come to this block."""
    store = meeting.store()
    if store.add(f"come/{number}", 1) == meeting.size:
        store.set(f"all/{number}", "here")
    store.wait([f"all/{number}"])


def meet_afresh(meeting: Meeting, number: int) -> None:
    """Give the ranks a new place to meet: torch does not take an old one twice."""
    store = meeting.store()
    if meeting.rank == 0:
        store.set(f"port/{number}", str(paceline.testing._free_port()))
    os.environ["MASTER_PORT"] = store.get(f"port/{number}").decode()


def close(names: dict[str, Any]) -> None:
    """Give back what a block has opened, so that the next one finds nothing of it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for value in names.values():
        if isinstance(value, paceline.Group):
            value.shutdown()
    paceline.uninstall()


def ranked(*, slow: bool) -> list[Block]:
    """The blocks of all pages that run on ranks."""
    found = [block for block in all_blocks() if block.runs_on_ranks]
    return [block for block in found if (block.note == "slow") is slow]


@needs_shm
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_code_of_the_pages_runs_on_two_ranks(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one pair of processes, which import torch's compiler once; errors name the page."""
    monkeypatch.chdir(tmp_path)
    spawn_ranks(2, run_blocks, ranked(slow=slow), prelude())


@pytest.mark.parametrize(
    "block", [b for b in all_blocks() if b.note == "as a module"], ids=lambda b: f"line {b.line}"
)
@needs_shm
def test_the_tests_in_the_pages_pass(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"docs_block_{block.line}"
    (tmp_path / f"{name}.py").write_text(block.code)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    try:
        tests = [value for key, value in vars(module).items() if key.startswith("test_")]
        assert tests
        for test in tests:
            test()
    finally:
        del sys.modules[name]


def test_every_block_of_code_runs_or_says_why_not() -> None:
    notes = {block.note for block in all_blocks()}
    assert all(note in _NOTES or note.startswith("not run: ") for note in notes), notes
    left_out = [block for block in all_blocks() if block.note.startswith("not run")]
    assert len(left_out) <= 4, [(block.page, block.line) for block in left_out]


def commands() -> list[Any]:
    """Every call of our command line in a page."""
    found = [
        pytest.param(line.partition("paceline ")[2].partition("  #")[0].strip(), id=line.strip())
        for page in PAGES
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if re.match(r"(srun .* |mpirun .* )?paceline [a-z]", line)
    ]
    assert len(found) > 5
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_in_the_pages_is_one_that_is_understood(command: str) -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from paceline.cli.app import SETTINGS, app_with

    name, *arguments = command.split()
    group = get_command(app_with(name))
    known = group.commands[name]  # type: ignore[attr-defined]
    known.make_context(name, arguments, **SETTINGS.get(name, {}))  # raises what is wrong


# -- completeness -----------------------------------------------------------------------------


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """Every name in code in the first column of a table."""
    rows = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)", row)}


def test_every_keyword_of_torchs_wrapper_has_a_row() -> None:
    keywords = list(inspect.signature(TorchDDP.__init__).parameters)[1:]
    assert set(keywords) <= first_cells(text_of("migrating.md"))


def test_every_keyword_and_method_of_torchs_join_has_a_row() -> None:
    calls = (TorchJoin.__init__, TorchDDP.join)
    keywords = {name for call in calls for name in inspect.signature(call).parameters}
    methods = {name for kind in (TorchJoin, TorchJoinHook) for name in vars(kind)}
    public = {name for name in methods if not name.startswith("_")}
    assert public | keywords - {"self", "kwargs"} <= first_cells(text_of("migrating.md"))


def test_every_public_method_of_torchs_wrapper_has_a_row() -> None:
    methods = [name for name in vars(TorchDDP) if not name.startswith("_")]
    assert set(methods) <= first_cells(text_of("migrating.md"))


def test_every_public_method_of_our_wrapper_that_torchs_lacks_has_a_row() -> None:
    ours = paceline.DistributedDataParallel
    own = [name for name, value in vars(ours).items() if inspect.isfunction(value)]
    added = {name for name in own if not name.startswith("_") and name not in vars(TorchDDP)}
    assert added <= first_cells(text_of("migrating.md"))


def test_every_public_attribute_of_torchs_wrapper_is_named_and_there() -> None:
    source = inspect.getsource(TorchDDP)
    assigned = set(re.findall(r"self\.([a-z]\w+)\s*(?::[^=\n]+)?=[^=]", source))
    named = set(re.findall(r"`(\w+)`", text_of("migrating.md")))
    assert assigned <= named


def test_the_attributes_that_the_page_names_are_there() -> None:
    section = text_of("migrating.md").split("## Attributes")[1].split("\n## ")[0]
    section = section.split("Private names")[0]
    names = set(re.findall(r"`(\w+)`", section)) - {"device_mesh", "buffer_hook"}
    ddp = wrapped_alone()
    assert {name for name in names if not hasattr(ddp, name)} == set()


def wrapped_alone() -> paceline.DistributedDataParallel:
    group = paceline.new_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    return paceline.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)


def headings(text: str) -> list[str]:
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)


def test_every_error_is_on_the_page_for_when_something_goes_wrong() -> None:
    found = headings(text_of("troubleshooting.md"))
    assert set(paceline.errors.__all__) <= set(found)


def test_the_page_names_no_error_that_is_gone() -> None:
    found = [name for name in headings(text_of("troubleshooting.md")) if name.endswith("Error")]
    assert set(found) <= set(paceline.errors.__all__)
    assert len(found) == len(set(found))


def quoted_messages() -> list[Any]:
    entry = re.compile(r"^### (\w+)\n\n> (.+)$", re.MULTILINE)
    found = entry.findall(text_of("troubleshooting.md"))
    return [pytest.param(*pair, id=pair[0]) for pair in found]


@pytest.mark.parametrize(("name", "words"), quoted_messages())
def test_the_words_that_the_page_quotes_are_in_the_message(name: str, words: str) -> None:
    kind = getattr(paceline.errors, name)
    fields = dataclasses.fields(kind)
    values = {field.name: a_value_of(str(field.type)) for field in fields}
    needed = {f.name: values[f.name] for f in fields if f.default is dataclasses.MISSING}
    assert words in f"{kind(**values)}\n{kind(**needed)}"


def a_value_of(kind: str) -> object:
    """Something of this type; enough to make an error speak."""
    values = {"int": 1, "float": 1.0, "bool": False, "str": "x", "object": "x", "int | None": 1}
    if kind in values:
        return values[kind]
    if kind.startswith("Mapping"):
        return {1: "x"}
    return ["x"] if "str]" in kind else [1]


def referenced() -> list[str]:
    entries = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return re.findall(r"^::: (\S+)$", entries, re.MULTILINE)


def found_at(path: str) -> object:
    """What an entry of the reference is about; a module's name may also be that of a function."""
    home, _, name = path.rpartition(".")
    return importlib.import_module(path) if path in DOORS else getattr(module_at(home), name)


def module_at(path: str) -> types.ModuleType:
    importlib.import_module(path)
    return sys.modules[path]


@pytest.mark.parametrize("door", [door for door in DOORS if door != "paceline.errors"])
def test_the_reference_has_every_public_name(door: str) -> None:
    module = importlib.import_module(door)
    described = {id(found_at(path)) for path in referenced()}
    public = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
    ours = {name: value for name, value in public.items() if describable(value)}
    assert [name for name, value in ours.items() if id(value) not in described] == []


def describable(value: object) -> bool:
    """Whether it is ours and something that a reference describes."""
    home = getattr(value, "__module__", "")
    return (inspect.isclass(value) or callable(value)) and str(home).startswith("paceline")


@pytest.mark.parametrize("path", sorted(referenced()))
def test_an_entry_of_the_reference_is_about_something_with_a_docstring(path: str) -> None:
    assert getattr(found_at(path), "__doc__", "")


def test_an_entry_of_the_reference_does_not_mean_a_module_by_mistake() -> None:
    """Where a file has the name of what is in it, mkdocstrings takes the file."""
    for path in referenced():
        file = ROOT / "src" / Path(*path.split("."))
        assert path in DOORS or not file.with_suffix(".py").exists(), path
        assert path in DOORS or not file.is_dir(), path


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_a_docstring(door: str) -> None:
    module = importlib.import_module(door)
    assert module.__doc__
    values = {f"{door}.{name}": getattr(module, name) for name in module.__all__}
    ours = {path: value for path, value in values.items() if describable(value)}
    assert [path for path, value in ours.items() if not value.__doc__] == []


@pytest.mark.parametrize("door", DOORS)
def test_every_public_method_has_a_docstring_or_one_to_inherit(door: str) -> None:
    module = importlib.import_module(door)
    values = [getattr(module, name) for name in module.__all__]
    kinds = [value for value in values if inspect.isclass(value) and describable(value)]
    assert [path for kind in kinds for path in undocumented(kind)] == []


def undocumented(kind: type) -> Iterator[str]:
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        value = getattr(value, "__func__", value)
        function = value.fget if isinstance(value, property) else value
        ours = inspect.isfunction(function) and function.__module__.startswith("paceline")
        if ours and not name.startswith("_") and not inspect.getdoc(getattr(kind, name)):
            yield f"{kind.__qualname__}.{name}"


def test_every_variable_that_a_user_may_set_is_on_its_page() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"PACELINE_[A-Z_]+[A-Z]", text)}
    assert read - set(BETWEEN_US) <= first_cells(text_of("reference/environment.md"))
    assert read == {*OWN, *BETWEEN_US}  # those that the doctor knows


def test_every_saved_result_is_on_the_page_of_benchmarks() -> None:
    saved = {f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks/results").iterdir()}
    shown = re.findall(r'^--8<-- "(.+)"$', text_of("benchmarks.md"), re.MULTILINE)
    assert saved == set(shown)


# -- links, pictures, and nothing from elsewhere ----------------------------------------------


def links_of(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        address, _, anchor = link.partition("#")
        assert "://" not in address, f"{link} leads out of the site"
        target = (page.parent / address).resolve() if address else page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors_of(target), link


def anchors_of(page: Path) -> set[str]:
    from markdown.extensions.toc import slugify

    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings(page.read_text())}


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_picture_says_what_it_shows_and_is_used() -> None:
    used = {}
    for page in PAGES:
        for alt, source in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            used[(page.parent / source).resolve()] = alt
    assert all(len(alt) > 20 for alt in used.values()), used
    drawn = set((DOCS / "pictures").iterdir())
    assert {path for path in drawn if path.suffix == ".svg"} <= set(used)


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda p: p.name)
def test_a_picture_is_well_formed_and_follows_light_and_dark(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.get("viewBox")
    assert "var(--md-" in picture.read_text()


def tool(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "_tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_loaded_from_another_host() -> None:
    pytest.importorskip("mkdocs")
    loads = tool("offline").external_loads
    for path in [*PAGES, *DOCS.rglob("*.svg"), *DOCS.rglob("*.css"), *DOCS.rglob("*.js")]:
        assert loads(path.read_text()) == [], path


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://elsewhere.org/a.js"></script>',
        '<link rel="stylesheet" href="//elsewhere.org/a.css">',
        '<img alt="" src=https://elsewhere.org/a.png>',
        "@import url(https://elsewhere.org/a.css)",
        "p { background: url('https://elsewhere.org/a.png') }",
    ],
)
def test_what_a_browser_would_fetch_elsewhere_is_found(html: str) -> None:
    pytest.importorskip("mkdocs")
    assert len(tool("offline").external_loads(html)) == 1


def test_a_link_to_elsewhere_is_no_load() -> None:
    pytest.importorskip("mkdocs")
    assert tool("offline").external_loads('<a href="https://elsewhere.org">there</a>') == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see :class:`Group`", "see [`Group`][paceline.Group]"),
        ("see :class:`~paceline.Group`", "see [`Group`][paceline.Group]"),
        ("see :meth:`no_such_thing`", "see `no_such_thing`"),
        ("``code`` here", "`code` here"),
        ("like this::\n\n    x = 1", "like this:\n\n    x = 1"),
        ("Like this. ::\n\n    x = 1", "Like this.\n\n    x = 1"),
    ],
)
def test_docstrings_become_markdown(text: str, expected: str) -> None:
    pytest.importorskip("griffe")
    assert tool("docstrings").markdown(text, "paceline.groups") == expected


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as ``make docs`` builds it."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_no_tool(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in PAGES}
    assert {page.relative_to(site) for page in site.rglob("*.html")} == {*pages, Path("404.html")}
    assert not list(site.rglob("*.py"))


@pytest.mark.slow
def test_the_search_of_a_site_opened_as_a_file_finds_something(site: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command = [browser, *options, "--virtual-time-budget=9000", "--dump-dom"]
    address = f"{(site / 'index.html').as_uri()}?q=diloco"
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=600)
    assert "matching documents" in done.stdout
