"""Which parameters have a place in buckets, as layers are frozen and thawed; without any ranks."""

from __future__ import annotations

from weakref import WeakMethod

import pytest
from torch import nn

from paceline.ddp.trained import Trained
from paceline.errors import ThawedParameterError


class Wish:
    """Whether gradients that come now are averaged."""

    def __init__(self) -> None:
        self.averages = True

    def now(self) -> bool:
        return self.averages


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "last": nn.Embedding(3, 2)})


def test_what_is_trained_gets_a_place_in_the_order_of_the_module() -> None:
    model = two_layers()
    model["last"].sparse = True
    params, names, sparse = Trained(model, ()).place()
    assert names == ["first.weight", "last.weight"]
    assert params == [model["first"].weight, model["last"].weight]
    assert sparse == [False, True]


def test_ignored_and_frozen_parameters_have_none() -> None:
    model = two_layers()
    assert Trained(model, {"last.weight"}).place()[1] == ["first.weight"]
    model["first"].requires_grad_(False)
    assert Trained(model, ()).place()[1] == ["last.weight"]


def test_freezing_is_a_change_and_thawing_what_has_no_place_is_more() -> None:
    model = two_layers()
    trained = Trained(model, ())
    trained.place()
    assert not trained.changed
    model["first"].requires_grad_(False)
    assert trained.changed
    assert not trained.has_thawed
    trained.place()
    model["first"].requires_grad_(True)
    assert trained.changed
    assert trained.has_thawed


def test_what_is_kept_has_a_place_though_it_is_frozen() -> None:
    model = two_layers()
    trained = Trained(model, ())
    trained.place()
    model["first"].requires_grad_(False)
    assert trained.place(keep=trained.placed)[1] == ["first.weight", "last.weight"]


def test_a_gradient_of_one_that_lost_its_place_is_refused_only_in_an_averaged_pass() -> None:
    model, wish = two_layers(), Wish()
    trained = Trained(model, ())
    trained.place()
    model["first"].requires_grad_(False)
    before = list(trained.placed)
    trained.place()
    trained.refuse_let_go(before, 3, WeakMethod(wish.now))
    model["first"].requires_grad_(True)
    wish.averages = False
    model["first"].weight.sum().backward()
    wish.averages = True
    with pytest.raises(ThawedParameterError, match="rank 3"):
        model["first"].weight.sum().backward()
