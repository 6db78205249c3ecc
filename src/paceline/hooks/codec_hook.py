"""CodecHook: averages buckets in encoded form.

::

    hook = CodecHook(TopK(0.01) | Int8())
    hook.register(ddp)
    ...
    hook.ratio  # how many times less was sent than by a plain all-reduce

**Order.** A bucket is encoded and its first collective begun when it is full; everything after that
happens when the last bucket of the pass has come. So all collectives are called by one thread, in
an order that does not depend on which of them ends first, and decoding does not take the cores from
the backward pass.

**Errors.** What encoding loses is kept on this rank and sent with the next gradients
(``_exchange/feedback.py``), by parameter, so buckets may be laid out anew. Gradients that
``ddp.samples`` has weighted are encoded so, and what is left of them is weighted anew in the next
pass. A rank that only stands in, with weight 0, keeps what it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import Work as TorchWork

from .._exchange import (
    Codec,
    Encodes,
    FutureJourney,
    Held,
    Meter,
    MeteredGroup,
    ParamSpan,
    Route,
    RouteSetting,
    RowLayout,
    as_codec,
    is_codec,
)
from .._reducer import GradBucket, local
from ..errors import CodecMismatchError, CodecSettingError, CodecStateError
from ..groups import Group, group_or_default

SMALL = 4096  # elements


class CodecHook:
    """A communication hook that sends gradients through a codec.

    Parameters with fewer than ``small`` elements are sent uncompressed. ``error_feedback=False``
    discards what encoding loses; use it only with codecs that are unbiased, such as a stochastic
    :class:`Int8`. The first ``warm_up`` passes are sent uncompressed, so that optimizers such as
    Adam learn the size of the gradients first. All settings must be the same on all ranks; this is
    checked when the hook is registered, or with the first bucket.
    """

    def __init__(
        self,
        codec: Encodes,
        process_group: ProcessGroup | None = None,
        *,
        error_feedback: bool = True,
        small: int = SMALL,
        warm_up: int = 0,
    ) -> None:
        self.codec = _checked(codec)
        if small < 0:
            raise CodecSettingError(f"CodecHook(small={small})", "small is not negative")
        if warm_up < 0:
            raise CodecSettingError(f"CodecHook(warm_up={warm_up})", "warm_up is not negative")
        self.error_feedback = error_feedback
        self.small, self.warm_up = small, warm_up
        self.step = 0  # passes so far
        self.residuals: Held = {}  # by parameter: what this rank has not sent yet
        self._owned: Held = {}  # the same of the averages that are this rank's to encode
        self._weight = 1.0  # what the gradients were multiplied by of which something is left
        self._meter = Meter()
        self.process_group = process_group  # None: the wrapper's
        self._ddp: Callable[[], Any] = lambda: None
        self._line: MeteredGroup | None = None
        self._agreed = False
        self._known: dict[int, tuple[int, str, Tensor]] = {}  # id → number, name, the parameter
        self._routes: dict[tuple[str, ...], Route] = {}
        self._journeys: list[FutureJourney] = []
        self._within = False  # a pass

    # -- use ----------------------------------------------------------------------------------

    def register(self, ddp: Any) -> None:
        """Average the gradients of ``ddp`` with this hook. Call it on all ranks before backward."""
        self._ddp = weakref.ref(ddp)
        for number, (name, param) in enumerate(ddp.module.named_parameters()):
            self._known[id(param)] = number, name, param
        self._agree(self.codec)
        ddp.register_comm_hook(self, run_codec_hook)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; all buckets of a pass complete when the last one has come."""
        try:
            return self._begin(bucket).future
        finally:
            if bucket.is_last():
                self._finish()

    __call__ = reduce

    def change(self, codec: Encodes) -> None:
        """Use another codec from the next pass on; every rank calls it between the same two passes.

        What the old codec lost is still sent. If ranks pass different codecs, all of them raise and
        keep the one they have.
        """
        self._between_passes("change")
        wanted = _checked(codec)
        self._agree(wanted)
        self.codec = wanted
        self._start_over()

    @property
    def prompt(self) -> bool:
        """Whether a call of this hook makes all its collectives before it returns.

        False while ranks still have to compare their settings.
        """
        return self._agreed

    @property
    def group(self) -> Group:
        """The group over which gradients are averaged."""
        return self._connect().group

    @property
    def bytes_sent(self) -> float:
        """The bytes that this rank has sent for gradients."""
        return self._meter.sent

    @property
    def ratio(self) -> float:
        """How many times more bytes a plain all-reduce of the buckets would have sent."""
        return self._meter.ratio

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next pass depends on. It differs between ranks: save each."""
        self._between_passes("state_dict")
        return {
            "codec": repr(self.codec),
            "codec_state": self.codec.state_dict(),
            "step": self.step,
            "weight": self._weight,
            "ranks": self._connect().ranks,
            "residuals": {name: held.clone() for name, held in self.residuals.items()},
            "owned": {name: held.clone() for name, held in self._owned.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; the next passes are bitwise those of the run that saved it.

        With another number of ranks, what encoding has lost so far is still sent, and the rest of
        the state is dropped.
        """
        self._between_passes("load_state_dict")
        if state["codec"] != repr(self.codec):
            raise CodecStateError(
                f"The state is that of {state['codec']}, and this hook uses {self.codec}.",
                "Make the hook with that codec, load the state, then change() it on all ranks.",
            )
        self._refuse_strangers(state["residuals"])
        self.codec.load_state_dict(state["codec_state"])
        self.step, self._weight = int(state["step"]), float(state["weight"])
        self._routes.clear()
        self.residuals = {name: held.clone() for name, held in state["residuals"].items()}
        same = int(state["ranks"]) == self._connect().ranks
        owned = state["owned"] if same else {}
        self._owned = {name: held.clone() for name, held in owned.items()}

    def _refuse_strangers(self, held: Mapping[str, Tensor]) -> None:
        known = {name: local(param).numel() for _, name, param in self._known.values()}
        strange = [name for name in held if known.get(name) != held[name].numel()]
        if known and strange:
            raise CodecStateError(
                f"The state has errors of {', '.join(strange[:3])}, and the model has no such "
                "parameters of that size.",
                "Load the state of a run with the same model, registered in the same way.",
            )

    # -- a pass -------------------------------------------------------------------------------

    def _begin(self, bucket: GradBucket) -> FutureJourney:
        if not self._within:
            self._within = True
            self._abandon()
            self._connect()
            self._reweight(_weight_of(bucket))
            if self.step == self.warm_up:  # from now on some parameters are large
                self._routes.clear()
            if not self._agreed:
                self._agree(self.codec)
        line, buffer = self._connect(), bucket.buffer()
        if buffer.is_sparse:
            steps = _sparse(line, buffer)
        else:
            self._meter.plain += line.plain_bytes(buffer)
            alone = bucket.is_last() and not self._journeys
            share = float(_weight_of(bucket) != 0)  # gradients come multiplied by their weight
            steps = self._route(bucket).travel(buffer, self.step, share=share, now=alone)
        journey = FutureJourney(steps, buffer)
        self._journeys.append(journey)
        return journey

    def _reweight(self, weight: float) -> None:
        """Multiply what is left by the weight of the gradients that come now."""
        if weight not in (0.0, self._weight):
            for held in (*self.residuals.values(), *self._owned.values()):
                held.mul_(weight / self._weight)
            self._weight = weight

    def _finish(self) -> None:
        """Bring all buckets to their end, in turn."""
        waiting, error = self._journeys, None
        try:
            while waiting:
                waiting = [journey for journey in waiting if journey.advance()]
        except BaseException as raised:
            error = raised
        for journey in self._journeys:
            journey.end(error)
        self._journeys = []
        self._within = False
        self.step += 1

    def _abandon(self) -> None:
        """Drop an earlier pass that was never completed."""
        for journey in self._journeys:
            journey.end(CodecStateError("The pass was never finished.", "Begin another one."))
        self._journeys = []

    # -- buckets ------------------------------------------------------------------------------

    def _route(self, bucket: GradBucket) -> Route:
        spans = self._spans(bucket)
        names = tuple(span.name for span in spans)
        if names not in self._routes:
            old = [key for key in self._routes if not set(key).isdisjoint(names)]
            route = self._make_route(spans, bucket.buffer())  # takes over what the old ones hold
            for key in old:
                del self._routes[key]
            self._routes[names] = route
        return self._routes[names]

    def _spans(self, bucket: GradBucket) -> list[ParamSpan]:
        spans, at = [], 0
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(param) not in self._known:
                number = len(self._known)
                self._known[id(param)] = number, str(number), param
            number, name, _ = self._known[id(param)]
            spans.append(ParamSpan(name, number, tuple(gradient.shape), at))
            at += gradient.numel()
        return spans

    def _make_route(self, spans: Sequence[ParamSpan], like: Tensor) -> Route:
        codec = self.codec
        layout = RowLayout.of(
            spans, codec.block, lambda span: self._large(span) and codec.gains(span.shape)
        )
        held = self.residuals if self.error_feedback else None
        return codec.route(RouteSetting(layout, self._connect(), like, held, self._owned))

    def _large(self, span: ParamSpan) -> bool:
        return self.step >= self.warm_up and span.numel >= max(self.small, 1)

    # -- the group ----------------------------------------------------------------------------

    def _connect(self) -> MeteredGroup:
        """Return a lane to the current group; the wrapper may have moved to another one."""
        given = self.process_group or getattr(self._ddp(), "process_group", None)
        given = group_or_default(given)
        if self._line is None or self._line.source is not given or not self._line.current:
            if self._line is not None:
                self._start_over()
                self.codec.restart()
            self._line = MeteredGroup(given, self._meter, self._device())
        return self._line

    def _device(self) -> torch.device:
        for _, _, param in self._known.values():
            return param.device
        return torch.device("cpu")

    def _agree(self, codec: Codec) -> None:
        """Raise on all ranks unless all have the same settings."""
        settings = self.small, self.warm_up, self.error_feedback, self.step
        mine = f"{codec}, (small, warm_up, error_feedback, step)={settings}"
        line = self._connect()
        said = [str(text) for text in line.group.all_gather_object(mine)]
        if len(set(said)) > 1:
            raise CodecMismatchError(line.rank, said)
        self._agreed = True

    def _start_over(self) -> None:
        """Lay out everything again, and send from here what belonged to the old layout of ranks."""
        for route in self._routes.values():
            route.hand_over(self.residuals)
        self._routes.clear()
        self._owned.clear()

    def _between_passes(self, what: str) -> None:
        if self._within:
            raise CodecStateError(
                f"{what}() was called inside a backward pass, whose buckets are under way.",
                "Call it between passes, on every rank between the same ones.",
            )


def run_codec_hook(hook, bucket):  # type: ignore[no-untyped-def]
    """``CodecHook.reduce`` without annotations, which torch's own wrapper would refuse."""
    return hook.reduce(bucket)


def _weight_of(bucket: Any) -> float:
    """What gradients were multiplied by; torch's own wrapper has no weights."""
    return float(getattr(bucket, "weight", 1.0))


def _sparse(line: MeteredGroup, buffer: Tensor) -> Iterator[Sequence[TorchWork]]:
    """Average sparse gradients uncompressed, since they are small already."""
    before = line.group.traffic.bytes_sent
    work = line.group.all_reduce(buffer, ReduceOp.AVG)
    sent = line.group.traffic.bytes_sent - before
    line.meter.sent += sent
    line.meter.plain += sent
    yield [work]


def _checked(codec: Encodes) -> Codec:
    if not is_codec(codec):
        raise CodecSettingError(
            f"CodecHook({type(codec).__name__})",
            "the codec is one of paceline.hooks, a chain of them, or has encode and decode",
        )
    return as_codec(codec)
