"""What is told of an elastic job."""

from paceline.cli.run.elastic.story import JobStory, tell_formed, tell_loss


def test_a_job_without_losses_has_no_story() -> None:
    story = JobStory()
    assert story.form((0, 1), 1.0) == 0.0
    assert list(story.told()) == []


def test_losses_are_told_with_the_time_the_others_took() -> None:
    story = JobStory()
    story.form((0, 1, 2), 0.0)
    story.lose(1, "it was killed by SIGKILL", 1.0)
    assert story.form((0, 2), 1.25) == 0.25
    story.lose(2, "ValueError: no", 3.0)
    assert story.form((0,), 3.75) == 0.75
    assert list(story.told()) == [
        "2 members were lost; the others went on after 0.50 s on average, 0.75 s at most",
        "  member 1: it was killed by SIGKILL (0.25 s)",
        "  member 2: ValueError: no (0.75 s)",
    ]


def test_of_many_losses_the_first_are_told_one_by_one() -> None:
    story = JobStory()
    for number in range(12):
        story.lose(number, "it was stopped", float(number))
        story.form((number + 1,), number + 0.5)
    told = list(story.told())
    assert (
        told[0]
        == "12 members were lost; the others went on after 0.50 s on average, 0.50 s at most"
    )
    assert told[-1] == "  … and 2 more"
    assert len(told) == 12


def test_a_loss_that_nobody_went_on_from_is_none_that_was_survived() -> None:
    story = JobStory()
    story.lose(0, "it was killed by SIGKILL", 1.0)
    assert story.unanswered == {0}
    assert list(story.told()) == []


def test_a_roster_that_is_heard_of_after_one_of_it_was_lost_did_not_go_on_from_that() -> None:
    story = JobStory()
    story.lose(0, "it was killed by SIGKILL", 1.0)
    story.lose(2, "it was killed by SIGKILL", 2.0)
    assert story.form((1, 2), 2.5) == 1.5
    assert story.unanswered == {2}
    assert story.form((1,), 3.0) == 1.0
    assert story.unanswered == set()


def test_the_words_for_losses_and_rosters() -> None:
    assert tell_loss(2, "it was stopped", 1, "; another is started") == (
        "member 2 is lost: it was stopped; 1 member of this host is left; another is started"
    )
    assert tell_formed(1, (0, 1, 2), [0, 1, 2], 0.0) == "members 0-2 train"
    assert tell_formed(2, (0, 2, 3), [3], 0.125) == (
        "members 0, 2, 3 train on after 0.12 s, with 3 new"
    )
    assert tell_formed(3, (3,), [], 0.0) == "member 3 trains on"


def test_those_who_are_left_meet_until_they_have_gone_on_or_took_too_long() -> None:
    story = JobStory()
    story.form((0, 1, 2), 0.0)
    assert not story.meets({0, 1, 2}, 10.0, within=0.5)
    story.lose(1, "it was killed by SIGKILL", 10.0)
    assert story.meets({0, 2}, 10.1, within=0.5)
    assert not story.meets({0, 2}, 10.6, within=0.5)
    assert not story.meets({3}, 10.1, within=0.5)  # a spare has nobody to meet
    story.form((0, 2), 10.2)
    assert not story.meets({0, 2}, 10.3, within=0.5)
    story.lose(3, "it was killed by SIGKILL", 11.0)  # a spare, whom nobody waits for
    assert not story.meets({0, 2}, 11.1, within=0.5)
