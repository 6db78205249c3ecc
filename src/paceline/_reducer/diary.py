"""Diary: what a reducer tells the recorder of its passes; nothing where the group has no board."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from .._torch.tensors import indices_of, values_of
from ..groups import Group
from ..recorder import events
from .bucket import Bucket, Phase
from .header import Kept

NOTICED = 20_000  # nanoseconds; a shorter wait was none


class Diary:
    """The times of one reducer's passes and buckets."""

    def __init__(self, group: Group, names: Callable[[int], Sequence[str]]) -> None:
        board = group.board
        self._board = board
        self._track = None if board is None else events.Track(board, names)
        self._notes: list[events.BucketEntry] = []  # of the pass that runs, by bucket
        self._seen = 0  # how many of them are known to have finished
        self._waited = 0

    def continue_from(self, other: Diary) -> None:
        """Go on counting where ``other`` stopped."""
        if self._track is not None and other._track is not None:
            self._track.steps, self._track.step = other._track.steps, other._track.step

    @property
    def model(self) -> int:
        """Which of the group's models this is, by the order in which they were wrapped."""
        return 0 if self._track is None else self._track.model

    def follow(self, kept: Kept, entry: events.Entry | None = None) -> None:
        """The last call of the pass has come when ``kept`` has; a device says so itself.

        Without ``entry`` it is that of the last bucket.
        """
        if entry is None and self._notes:
            entry = self._notes[-1].call
        if entry is not None and not kept.is_completed():
            kept.entry = entry
            entry.runs_until(kept)

    def forward_begins(self) -> None:
        """A step begins."""
        if self._track is not None:
            self._track.forward_begins()

    def forward_ends(self) -> None:
        """The output is there."""
        if self._track is not None:
            self._track.forward_ends()

    def backward_begins(self) -> None:
        """Gradients come."""
        if self._track is not None:
            self._track.backward_begins()

    def fills(self, bucket: Bucket) -> None:
        """A bucket is to be sent off: all its gradients are there."""
        if self._track is not None:
            self._notes.append(self._track.bucket_filled(bucket.index))

    def launches(self, bucket: Bucket) -> None:
        """The bucket that was filled last is sent off now: the calls that follow are its own."""
        if self._track is not None and self._board is not None:
            note = self._notes[-1]
            note.nbytes = _bytes_of(bucket.buffer)
            self._board.latest, self._board.by = None, (self._track, note.bucket)
            note.launched = events.now()

    def launched(self) -> None:
        """It has been; calls are not its own any more."""
        if self._board is not None:
            self._board.by = None
            self._notes[-1].call = self._board.latest

    def looks(self, buckets: Sequence[Bucket]) -> None:
        """Note which buckets have arrived in the meantime."""
        while self._seen < len(self._notes) and _arrived(buckets[self._seen]):
            self._finish(self._notes[self._seen])

    def wait(self, bucket: Bucket) -> None:
        """Wait for a bucket, and note for how long."""
        if bucket.index >= len(self._notes):
            return bucket.wait()
        note, began = self._notes[bucket.index], events.now()
        try:
            bucket.wait()
        except BaseException as error:
            if note.call is not None and bucket.future is None:  # the engine's, not a hook's
                events.failed(note.call, error)
            raise
        took = events.now() - began
        if took > NOTICED:
            note.waited = began
            self._waited += took
        if not note.finished:
            self._finish(note)
        return None

    def wait_for(self, work: TorchWork) -> None:
        """Wait for what is not a bucket."""
        began = events.now()
        work.wait()
        took = events.now() - began
        self._waited += took if took > NOTICED else 0

    def _finish(self, note: events.BucketEntry) -> None:
        note.finished = events.now()
        if note.call is not None and not note.call.finished:
            note.call.finished = note.finished
        self._seen += 1

    def ends(self) -> None:
        """The pass is over."""
        if self._track is not None:
            self._track.backward_ends(self._waited)
        if self._board is not None:
            self._board.by = None
        self._notes, self._seen, self._waited = [], 0, 0


def _arrived(bucket: Bucket) -> bool:
    """Whether it is known to have; a device is not asked (``Entry.follow`` says why)."""
    asks = bucket.phase is Phase.IN_FLIGHT and bucket.future is None and bucket.buffer.is_cpu
    return asks and events.is_over(bucket.work)


def _bytes_of(buffer: Tensor) -> int:
    if buffer.layout is torch.strided:
        return buffer.nbytes
    return indices_of(buffer).nbytes + values_of(buffer).nbytes
