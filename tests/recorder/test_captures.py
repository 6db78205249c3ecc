"""What a thread asks a GPU beside a capture; the CUDA library is a stand-in."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from paceline._torch import capture


class Library:
    """Keeps the mode of one thread, as CUDA's runtime does."""

    def __init__(self) -> None:
        self.mode = 0
        self.calls = 0

    def cudaThreadExchangeStreamCaptureMode(self, given: Any) -> None:
        place = ctypes.cast(given, ctypes.POINTER(ctypes.c_int))
        self.mode, place[0] = place[0], self.mode
        self.calls += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(capture, "_library", lambda: library)
    return library


def test_inside_a_thread_has_no_part_in_captures_and_has_it_again_behind(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with capture.beside_captures():
        assert library.mode == 2
    assert library.mode == 0


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="this process uses a GPU")
def test_a_driver_that_torch_has_not_started_is_left_alone(library: Library) -> None:
    with capture.beside_captures():
        pass
    assert library.calls == 0
