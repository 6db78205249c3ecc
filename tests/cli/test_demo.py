"""``paceline demo``: its parts, its ranks as threads, and the command as a user runs it."""

import io
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from paceline.cli import main
from paceline.cli.demo import live
from paceline.cli.demo import tasks as demo_tasks
from paceline.cli.demo.command import _run, _tell_what_auto_picks, busy_note, summary
from paceline.cli.demo.compare import Comparison
from paceline.cli.demo.gpt import CharGPT, columns_of, loss_of, losses_of, squared_relu, write
from paceline.cli.demo.pace import EVERY, Pace, TrainingClock
from paceline.cli.demo.rank import DemoPlan, Trainer, TrainingOutcome
from paceline.cli.demo.talk import Checked, Message, Stage, TalkListener, Teller, Tick
from paceline.cli.demo.tasks import TASKS, GptTask
from paceline.cli.demo.text import Batch, batches, cut, load_library, to_numbers, to_text
from paceline.groups import Availability, Group, capabilities
from paceline.testing import run_ranks
from tests.waiting import until

needs_shm = pytest.mark.skipif(
    not capabilities()["shm"].available, reason=capabilities()["shm"].reason
)

# -- the pace ---------------------------------------------------------------------------------


def test_progress_is_that_of_steps_or_of_time_whichever_is_further() -> None:
    pace = Pace(steps=100, seconds=50.0)
    assert pace.progress(0, 0.0) == 0.0
    assert pace.progress(20, 5.0) == 0.2
    assert pace.progress(20, 25.0) == 0.5
    assert pace.progress(20, 80.0) == pace.progress(100, 0.0) == 1.0
    assert Pace(math.inf, 10.0).progress(12345, 5.0) == 0.5


def test_the_rate_grows_for_some_steps_and_then_falls_to_nothing() -> None:
    pace = Pace(steps=1000, seconds=math.inf)
    rates = [pace.rate(step, pace.progress(step, 0.0)) for step in range(1001)]
    top = rates.index(max(rates))
    assert 20 < top < 40
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == 0.0


def test_a_run_of_few_steps_does_not_spend_them_all_on_warming_up() -> None:
    assert Pace(steps=5, seconds=math.inf).rate(0, 0.0) == 1.0


def test_all_ranks_read_the_clock_of_rank_0() -> None:
    def progress(group: Group) -> list[float]:
        clock = TrainingClock(group, Pace(math.inf, 1e-9 if group.rank() == 0 else 1e9))
        clock.pace = Pace(math.inf, 1e6)  # what passes meanwhile is nothing to it
        clock._began -= 5e5 + 1e5 * group.rank()
        return [clock.progress(step) for step in range(EVERY + 1)]

    first, second = run_ranks(2, progress)
    assert first == second
    assert 0.5 <= first[0] < 0.59


# -- the text ---------------------------------------------------------------------------------


def test_two_ranks_draw_what_one_rank_with_twice_the_batch_draws() -> None:
    text = torch.arange(5000) % 128
    one = next(batches(0, 1, batch_size=6, context=8, text=text))
    halves = [next(batches(rank, 2, batch_size=3, context=8, text=text)) for rank in (0, 1)]
    assert torch.equal(one.inputs[0::2], halves[0].inputs)
    assert torch.equal(one.targets[1::2], halves[1].targets)


def test_each_target_is_the_character_after_its_input() -> None:
    batch = cut(torch.arange(100), torch.tensor([3, 40]), 5)
    assert batch.inputs.tolist() == [[3, 4, 5, 6, 7], [40, 41, 42, 43, 44]]
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_the_held_out_files_are_not_trained_on() -> None:
    text = load_library()
    training = bytes(text.training.tolist())
    asked = bytes(text.held_out.tolist())
    assert len(asked) > 100_000
    assert len(training) > 5 * len(asked)
    stretches = [asked[at : at + 200] for at in range(0, len(asked) - 200, len(asked) // 50)]
    assert sum(stretch in training for stretch in stretches) < 5  # licences are everywhere


def test_text_survives_the_way_to_numbers_and_back() -> None:
    assert to_text(to_numbers("def f():\n    pass")[0].tolist()) == "def f():\n    pass"
    assert to_text([7, 127, 97]) == "??a"


# -- the model --------------------------------------------------------------------------------


def small_gpt() -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(128, 16, 16, 2, 1, recent=4, columns=True, bend=squared_relu)


def test_no_guess_depends_on_a_character_that_comes_later() -> None:
    model = small_gpt()
    one = torch.randint(128, (1, 16))
    other = one.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 128
    before, after = model(one), model(other)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9], after[0, 9])


def test_a_guess_depends_on_the_characters_right_before_it_even_without_attention() -> None:
    model = small_gpt()
    model.blocks = nn.Sequential()
    one = torch.randint(32, 126, (1, 16))  # and no newline, which would move columns
    other = one.clone()
    other[0, 5] = (other[0, 5] + 1) % 128
    moved = (model(one) != model(other)).any(-1)[0].tolist()
    assert moved == [5 <= place < 9 for place in range(16)]


def test_a_column_counts_from_the_last_newline_in_sight() -> None:
    text = to_numbers("ab\ncd\n\ne")
    assert columns_of(text, 10).tolist() == [[10, 11, 0, 1, 2, 0, 0, 1]]


def test_the_losses_of_the_sequences_have_the_mean_that_is_trained_on() -> None:
    model, text = small_gpt(), torch.randint(128, (500,))
    batch = cut(text, torch.tensor([1, 50, 90]), 16)
    torch.testing.assert_close(losses_of(model, batch).mean(), loss_of(model, batch).detach())


def test_it_writes_on_from_the_prompt_beyond_its_context() -> None:
    text = write(small_gpt(), "def ", 30)
    assert len(text) == 34
    assert text.startswith("def ")
    assert text == write(small_gpt(), "def ", 30)


# -- what the ranks tell ----------------------------------------------------------------------


def tick(rank: int = 0, step: int = 10, **facts: float) -> Tick:
    given = {"progress": 0.5, "loss": 2.0, "samples": 80, "seconds": 4.0}
    given |= {"own_seconds": 0.1, "waiting": 0.25} | facts
    return Tick(rank, step, **given)  # type: ignore[arg-type]


def test_a_message_arrives_as_it_was_sent() -> None:
    heard: list[Message] = []
    arrived = threading.Event()

    def hear(message: Message) -> None:
        heard.append(message)
        if isinstance(message, Stage):
            arrived.set()

    sent = [tick(), Checked(3, 1.5), Stage("done")]
    with TalkListener(hear) as listener, Teller(listener.address) as teller:
        for message in sent:
            teller.tell(message)
        assert arrived.wait(120)
    assert heard == sent


def test_a_rank_that_tells_a_process_that_is_gone_fails() -> None:
    with TalkListener(lambda message: None) as listener:
        address = listener.address
    with Teller(address) as teller, pytest.raises(ConnectionRefusedError):
        teller.tell(tick())


def test_ranks_can_go_on_telling_when_what_they_tell_can_no_longer_be_shown() -> None:
    def fail(message: Message) -> None:
        raise BrokenPipeError

    with TalkListener(fail) as listener, Teller(listener.address) as teller:
        for _ in range(1000):
            teller.tell(Stage("next"))  # would wait for ever if nobody took them


def test_a_tick_that_nobody_takes_holds_no_rank_up() -> None:
    listener = TalkListener(lambda message: None)  # never entered: it takes nothing
    with Teller(listener.address) as teller:
        for _ in range(5000):
            teller.tell(tick())
    listener._socket.close()


# -- the view ---------------------------------------------------------------------------------


def test_the_board_adds_up_the_ranks_and_finds_the_slow_one() -> None:
    board = live.Scoreboard("title", "loss", 2)
    for seconds, samples in ((1.0, 10), (2.0, 30)):
        board.hear(tick(0, samples=samples, seconds=seconds, loss=1.0))
        board.hear(tick(1, samples=samples, seconds=seconds, loss=3.0, own_seconds=0.2, waiting=0))
    assert board.samples_per_second() == 40.0
    assert board.losses[-1] == 2.0
    assert board.waiting == 0.125
    assert board.own_speed(0) == 2 * board.own_speed(1) > 0


def test_a_curve_keeps_its_shape_in_one_line() -> None:
    assert live.sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert live.sparkline([]) == ""
    assert live.sparkline([1.0, 1.0]) == "▁▁"
    assert live.shrink([4.0, 2.0, 1.0, 1.0], 2) == [3.0, 1.0]
    falling = live.sparkline([1000.0 - i for i in range(1000)], 20)
    assert len(falling) == 20
    assert list(falling) == sorted(falling, reverse=True)


def test_the_page_shows_progress_loss_speed_waiting_and_each_rank() -> None:
    board = live.Scoreboard("a title", "held-out loss", 2)
    console = Console(file=io.StringIO(), width=100)
    console.print(live.page(board))  # before anything has happened
    for rank in (0, 1):
        board.hear(tick(rank, waiting=0.1 + 0.2 * rank))
    board.hear(Checked(5, 1.234))
    board.hear(Stage("comparing"))
    console.print(live.page(board))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("a title", "50%", "step 10", "2.000", "1.234", "40 samples/s", "20.0%"):
        assert part in shown, part
    assert "comparing" in shown
    assert len(re.findall(r"^│ +[01] +80 samples/s", shown, re.MULTILINE)) == 2


@pytest.mark.parametrize("width", [44, 80, 200])
def test_the_page_shows_the_whole_curve_and_title_however_wide_the_terminal_is(width: int) -> None:
    board = live.Scoreboard(f"paceline demo: {GptTask.title}", GptTask.measure, 2)
    for step in range(300):
        board.hear(tick(step=step, loss=float(300 - step)))
    for step in range(8):
        board.hear(Checked(step, step / 10))
    board.hear(Stage("comparing with torch's DistributedDataParallel over gloo"))
    console = Console(file=io.StringIO(), width=width)
    console.print(live.page(board, width))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert "█" in shown.split("loss", 1)[1].split("\n")[0]
    assert "▁  1.000" in shown  # the curve's last stretch, and the loss there
    assert " 0.700 " in shown
    words = shown.replace("│", " ").replace("─", " ").split()
    assert " ".join(board.title.split()) in " ".join(words)
    assert max(map(len, shown.splitlines())) <= min(width, live.WIDE)


def test_a_run_of_one_step_has_a_speed() -> None:
    board = live.Scoreboard("title", "loss", 1)
    board.hear(tick(step=1, samples=8, seconds=2.0))
    board.hear(tick(step=1, samples=8, seconds=4.0, progress=1.0))
    assert board.samples_per_second() == 2.0


def test_where_there_is_no_terminal_it_says_a_line_at_each_stage_and_at_the_end() -> None:
    out = io.StringIO()
    view = live.open_view(live.Scoreboard("a title", "loss", 2), out)
    assert isinstance(view, live.PlainView)
    for message in (tick(), tick(step=11), tick(1), tick(step=12, progress=1.0), Stage("next")):
        view.hear(message)
    view.close()
    title, first, last, stage = out.getvalue().splitlines()
    assert (title, stage) == ("a title", "next")
    assert "step   10" in first
    assert "100%" in last


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_page_is_drawn_in_place_and_stays_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    view = live.open_view(live.Scoreboard("a title", "loss", 2), out)
    assert isinstance(view, live.PageView)
    for message in (tick(), tick(1), Stage("comparing")):
        view.hear(message)
    view.close()
    shown = out.getvalue()
    assert "starting 2 ranks" in shown
    assert "comparing" in shown.rsplit("a title", 1)[1]
    assert "\x1b[1A" in shown  # it went up to draw over what was there


def test_a_terminal_that_cannot_draw_over_what_it_shows_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(
        live.open_view(live.Scoreboard("a title", "loss", 2), Terminal()), live.PlainView
    )


# -- training on threads ----------------------------------------------------------------------


class TinyTask(GptTask):
    """The GPT's task with a model and a text that take no time."""

    asked = 8

    def model(self) -> nn.Module:
        return small_gpt()

    def batches(self, group: Group) -> Iterator[Batch]:
        text = torch.arange(2000) % 50
        return batches(group.rank(), group.size(), batch_size=4, context=16, text=text)

    def check(self, model: nn.Module, group: Group) -> float:
        return float(losses_of(model, next(self.batches(group))).mean())


def test_ranks_train_alike_and_stop_after_the_same_step_when_time_is_up() -> None:
    def train(group: Group) -> tuple[int, Tensor]:
        model = TinyTask().model()
        with Teller("") as nobody:
            trainer = Trainer(TinyTask(), model, group, Pace(math.inf, 0.5), nobody)
            trainer.train()
        return trainer.steps, torch.cat([p.detach().flatten() for p in model.parameters()])

    (steps, weights), (others_steps, others) = run_ranks(2, train)
    assert steps == others_steps >= EVERY
    assert torch.equal(weights, others)


def test_training_ends_after_the_asked_steps_and_lowers_the_loss() -> None:
    def train(group: Group) -> tuple[int, float, float]:
        task, model = TinyTask(), small_gpt()
        before = task.check(model, group)
        with Teller("") as nobody:
            trainer = Trainer(task, model, group, Pace(40, math.inf), nobody)
            trainer.train()
        return trainer.steps, before, task.check(model, group)

    for steps, before, after in run_ranks(2, train):
        assert steps == 40
        assert after < before - 0.5


# -- what it says in the end ------------------------------------------------------------------


def test_the_summary_names_ranks_engine_speed_and_loss() -> None:
    ending = TrainingOutcome("shm", 291456, 800, 12800, 40.0, 4.841, 1.597, 0.021, "", None)
    text = summary(TASKS["gpt"], ending, 2)
    for part in ("291,456 parameters", "800 steps on 2 ranks over shm", "320 samples/s", "2.1%"):
        assert part in text
    assert "4.841 nats per character before" in text
    assert "1.597 now" in text


def test_times_are_called_in_doubt_only_where_others_use_the_cores() -> None:
    assert busy_note(2.3, ranks=2, cores=2) == ""
    assert "load 9.0" in busy_note(9.0, ranks=2, cores=2)


def test_the_comparison_is_a_median_of_ratios_and_tells_how_far_losses_are_apart() -> None:
    found = Comparison([0.9, 0.8, 2.0], [1.0, 1.0, 2.5], 1.5, 1.5)
    assert found.ratios()[1] == 0.8
    assert "0.80 of it" in found.sentence("shm")
    assert "equal to the last bit" in found.sentence("shm")
    assert "differ by 1e-03" in Comparison([1.0] * 2, [1.0] * 2, 1.0, 1.001).sentence("shm")


# -- wrong input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nproc", "0"], "--nproc 0: give a number of ranks from 1 to 64, or auto"),
        (["--nproc", "two"], "--nproc two"),
        (["--steps", "0"], "--steps"),
        (["--seconds", "0"], "--seconds 0: give a number above 0"),
        (["--seconds", "inf"], "--seconds inf"),
        (["--backend", "smoke"], "smoke"),
        (["--model", "llama"], "llama"),
        (["--out", f"{__file__}/here"], "Not a directory"),
        (["--out", __file__], "this is a file; give a folder"),
        (["--out", "/proc"], "give another folder"),  # where nothing can be written
    ],
)
def test_wrong_input_gives_one_line_and_the_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("paceline: ")
    assert part in said


def test_a_report_that_could_not_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "report.html in it is a folder" in capsys.readouterr().err


def test_without_scikit_learn_the_digits_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_tasks.importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--model", "digits"]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def test_where_shm_cannot_be_used_it_says_so_and_takes_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"auto": Availability(True, "picks gloo on CPU"), "shm": Availability(False, "no cc")}
    monkeypatch.setattr("paceline.groups.capabilities", lambda: found)
    _tell_what_auto_picks("auto")
    assert capsys.readouterr().err == "paceline: auto picks gloo on CPU.\n"
    assert main(["demo", "--backend", "shm"]) == 2
    assert "demo --backend shm: not available here: no cc." in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_demo_with_its_own_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import typer

    plan = DemoPlan("gpt", "no such engine", 1, Pace(1, math.inf), False, str(tmp_path), "")
    with pytest.raises(typer.Exit) as ended:
        _run(plan, 1)
    assert ended.value.exit_code == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("paceline: demo: rank 0 failed: UnknownBackendError: ")
    assert "Traceback" in (tmp_path / "failure.txt").read_text()


# -- the command, as a user runs it -----------------------------------------------------------


def run_demo(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints; it must end well. Here, because ranks then start sooner."""
    code = main(["demo", *arguments])
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    return said.out


@needs_shm
def test_the_demo_trains_compares_and_writes_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-00007.json").write_text("of a run before")
    (tmp_path / "failure.txt").write_text("of a run before")
    said = run_demo(capfd, "--nproc", "2", "--steps", "12", "--out", str(tmp_path))
    assert "12 steps on 2 ranks over shm" in said
    before, after = re.findall(r"was (\S+) nats.* is (\S+) now", said)[0]
    assert float(after) < float(before) - 0.5
    assert "with torch's DistributedDataParallel over gloo" in said
    assert "\nclass Reader:\n    def " in said  # what it writes
    assert sorted(p.name for p in tmp_path.glob("*.json") if "rank" in p.name) == [
        "rank-00000.json",
        "rank-00001.json",
    ]
    assert not (tmp_path / "failure.txt").exists()
    report = Path(said.rsplit("The report of the run: ", 1)[1].strip())
    assert report == tmp_path / "report.html"
    assert "<html" in report.read_text().lower()


@pytest.mark.slow
def test_the_digits_are_read_over_gloo_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--model", "digits", "--backend", "gloo", "--nproc", "2", "--no-compare"]
    said = run_demo(capfd, *arguments, "--steps", "60", "--out", str(tmp_path))
    assert "60 steps on 2 ranks over gloo" in said
    assert float(re.findall(r"is (\S+) now", said)[0]) > 0.9
    assert said.count("read as") == 4
    assert max(len(line) for line in said.splitlines() if "read as" in line) <= 80


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    arguments = ["--nproc", "2", "--seconds", "600", "--no-compare", "--out", str(tmp_path)]
    demo = subprocess.Popen(
        [sys.executable, "-m", "paceline", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        assert any("step" in line for line in demo.stdout)  # the ranks are training
        os.killpg(demo.pid, signal.SIGINT)
        said = demo.communicate(timeout=300)[1]
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert said.splitlines()[-1] == "paceline: stopped; all ranks are ended."
    assert until(lambda: in_session(demo.pid) == [])  # multiprocessing's own servers are last


def in_session(leader: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(name)
    return found


@pytest.mark.slow
def test_the_default_run_comes_below_two_nats_per_character(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = run_demo(capfd, "--nproc", "2", "--out", str(tmp_path))
    assert float(re.findall(r"is (\S+) now", said)[0]) < 2.0
