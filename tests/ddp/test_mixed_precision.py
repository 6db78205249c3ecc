"""Caster: low precision inside the forward, full precision everywhere else."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision as TorchsMixedPrecision
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel
from paceline.ddp.mixed_precision import Caster, _MixedPrecision, cast_floats, strip
from paceline.groups import Group
from paceline.testing import run_ranks

LOW = torch.bfloat16
POLICY = _MixedPrecision(param_dtype=LOW, reduce_dtype=LOW, buffer_dtype=LOW)


class Probe(nn.Module):
    """Notes the types that it sees in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {t.dtype for t in (x, *self.parameters(), *self.linear.parameters())}
        return self.linear(x) * self.scale + self.shift


def full_precision(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in parameters)


def low_by_hand(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of the summed squares of ``module.to(LOW)``, in float32."""
    module = copy.deepcopy(module).to(LOW)
    module(x.to(LOW)).float().square().sum().backward()
    return [p.grad.float() for p in module.parameters() if p.requires_grad]


def train(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).float().square().sum().backward()
    return [p.grad for p in module.parameters() if p.requires_grad]


# What the forward sees, and what is left afterwards.


def test_the_forward_sees_low_precision_and_nobody_else_does() -> None:
    module = Probe()
    state = {name: p.clone() for name, p in module.named_parameters()}
    Caster(module, POLICY)
    for _ in range(2):
        output = module(torch.randn(2, 3))
        assert module.seen == {LOW}
        assert output.dtype == LOW
        assert full_precision(module)
        output.sum().backward()
        assert module.linear.weight.grad.dtype == torch.float32
        assert module.scale.grad is None
    assert_close(dict(module.named_parameters()), state)


def test_gradients_are_those_of_a_model_in_low_precision() -> None:
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 4)
    expected = low_by_hand(module, x)
    Caster(module, POLICY)
    assert_close(train(module, x), expected, rtol=0, atol=0)


def test_gradients_of_several_forwards_add_up_in_full_precision() -> None:
    module, batches = nn.Linear(4, 2), [torch.randn(3, 4) for _ in range(3)]
    weights, biases = zip(*(low_by_hand(module, x) for x in batches), strict=True)
    Caster(module, POLICY)
    outputs = [module(x) for x in batches]
    sum(o.float().square().sum() for o in outputs).backward()
    assert_close([module.weight.grad, module.bias.grad], [sum(weights), sum(biases)])


def test_buffers_are_cast_at_once_and_only_floating_ones() -> None:
    module = Probe()
    shift = module.shift
    Caster(module, POLICY)
    assert module.shift is shift
    assert shift.dtype == LOW
    assert module.steps.dtype == torch.int64


def test_what_the_policy_does_not_name_stays() -> None:
    module = Probe()
    Caster(module, _MixedPrecision(reduce_dtype=LOW))
    module(torch.randn(2, 3))
    assert module.seen == {torch.float32}
    assert module.shift.dtype == torch.float32


def test_ignored_parameters_and_buffers_stay_under_all_their_names() -> None:
    class Tied(Probe):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.linear.bias

        def forward(self, x: Tensor) -> Tensor:
            self.seen = {self.alias.dtype, self.linear.bias.dtype}
            return x * self.linear.weight.sum()

    module = Tied()
    Caster(module, POLICY, ["linear.bias", "shift"])
    assert module(torch.randn(2, 3)).dtype == LOW
    assert module.seen == {torch.float32}
    assert module.shift.dtype == torch.float32


def test_parameters_carry_the_attributes_of_torchs_mixed_precision_unless_ignored() -> None:
    module = Probe()
    caster = Caster(module, POLICY, ["linear.bias"])
    assert module.linear.weight._mp_param.dtype == LOW
    assert module.scale._fp_param.dtype == torch.float32
    assert not hasattr(module.linear.bias, "_mp_param")
    caster.remove()
    assert not hasattr(module.linear.weight, "_mp_param")


def test_notes_on_a_parameter_are_on_its_copy_too() -> None:
    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.factor

    module = Noted(1, 1)
    module.weight.factor = 3
    Caster(module, POLICY)
    assert module(torch.ones(1, 1)).dtype == LOW


def test_parameters_require_gradients_in_a_forward_without_gradients() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.requires_grad
            with torch.enable_grad():
                return super().forward(x)

    module = Picky(2, 2)
    Caster(module, POLICY)
    with torch.no_grad():
        output = module(torch.ones(1, 2))
    output.sum().backward()
    assert module.weight.grad is not None


# Models of many kinds.


def test_a_shared_parameter_is_cast_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            assert self.a.weight is self.b.weight
            return self.b(self.a(x))

    module, x = Shared(), torch.randn(3, 2)
    expected = low_by_hand(module, x)
    Caster(module, POLICY)
    assert_close(train(module, x), expected, rtol=0.02, atol=0.02)
    assert module.a.weight is module.b.weight


def test_parameters_that_are_read_without_calling_their_module_are_cast() -> None:
    module = nn.MultiheadAttention(4, 2)
    Caster(module, POLICY)
    x = torch.randn(3, 1, 4)
    output, _ = module(x, x, value=x)
    output.sum().backward()
    assert output.dtype == LOW
    assert module.out_proj.weight.grad.dtype == torch.float32


def test_recurrent_layers_compute_in_low_precision_and_keep_no_copies() -> None:
    module = nn.LSTM(3, 4)
    weights = list(module._flat_weights)
    Caster(module, POLICY)
    output, _ = module(torch.randn(5, 2, 3))
    output.sum().backward()
    assert output.dtype == LOW
    assert all(a is b for a, b in zip(module._flat_weights, weights, strict=True))
    copy.deepcopy(module)(torch.randn(5, 2, 3))


def test_containers_of_parameters_are_cast() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.table = nn.ParameterDict({"a": torch.ones(2)})

        def forward(self, x: Tensor) -> Tensor:
            return x * self.row[0] * self.row[1] * self.table["a"]

    module = Listed()
    Caster(module, POLICY)
    assert module(torch.ones(2)).dtype == LOW
    assert full_precision(module)


def test_parametrized_and_normalized_weights_are_cast() -> None:
    weight_norm = nn.utils.parametrizations.weight_norm
    module = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3)))
    Caster(module, POLICY)
    output = module(torch.randn(2, 3))
    output.sum().backward()
    assert output.dtype == LOW
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_a_parameter_that_forward_replaces_stays_replaced() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            output = x * self.weight
            self.weight = nn.Parameter(torch.zeros(3))
            return output

    module = Growing()
    Caster(module, POLICY)
    module(torch.ones(2))
    assert module.weight.shape == (3,)


def test_parameters_given_for_one_call_are_cast() -> None:
    module = Probe()
    Caster(module, POLICY)
    weight = torch.zeros(3, 3, requires_grad=True)
    output = torch.func.functional_call(module, {"linear.weight": weight}, (torch.randn(2, 3),))
    output.sum().backward()
    assert module.seen == {LOW}
    assert weight.grad.dtype == torch.float32
    assert full_precision(module)


# Calls inside calls, and calls that fail.


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth=depth - 1)
        assert self.linear.weight.dtype == LOW
        return self.linear(x)


def test_a_model_that_calls_itself_is_back_in_full_precision_only_at_the_end() -> None:
    module = Recursive()
    Caster(module, POLICY)
    module(torch.ones(1, 2)).sum().backward()
    assert full_precision(module)


def test_a_forward_that_raises_leaves_full_precision_behind() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no")

    for module in (Failing(2, 2), nn.Sequential(nn.Linear(2, 2), Failing(2, 2))):
        Caster(module, POLICY)
        with pytest.raises(KeyError):
            module(torch.ones(1, 2))
        assert full_precision(module)


def test_an_interrupted_forward_can_be_restored() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    module = Interrupted(2, 2)
    caster = Caster(module, POLICY)
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(1, 2))
    caster.restore()
    assert full_precision(module)


def test_a_part_called_by_itself_computes_in_full_precision() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    Caster(module, POLICY)
    assert module[0](torch.ones(1, 2)).dtype == torch.float32


# Checkpointing.


class Block(nn.Module):
    """Checkpoints a part of itself, or a function that calls the part twice."""

    def __init__(self, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant, self.whole = reentrant, whole
        self.checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        target = self.part if self.whole else self.steps
        if not self.checkpointed:
            return target(x)
        return checkpoint(target, x, use_reentrant=self.reentrant)

    def steps(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_recomputation_sees_the_same_types_as_the_forward(reentrant: bool, whole: bool) -> None:
    module, x = Block(reentrant, whole), torch.randn(3, 4)
    plain = copy.deepcopy(module)
    plain.checkpointed = False
    Caster(module, POLICY)
    Caster(plain, POLICY)
    assert_close(train(module, x), train(plain, x), rtol=0.02, atol=0.02)
    assert full_precision(module)


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = Deep(depth - 1) if depth else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.linear(x), use_reentrant=False)


def test_checkpoints_within_checkpoints_are_recomputed_alike() -> None:
    module, x = Deep(3), torch.randn(3, 4)
    expected = low_by_hand(module, x)
    Caster(module, POLICY)
    assert_close(train(module, x), expected, rtol=0.02, atol=0.02)
    assert full_precision(module)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_part_that_calls_itself_is_recomputed_to_its_end(reentrant: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Recursive()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    module, x = Around(), torch.randn(3, 2, requires_grad=True)
    expected = low_by_hand(module.part, x.detach())
    Caster(module, POLICY)
    assert_close(train(module, x), expected, rtol=0.02, atol=0.02)
    assert full_precision(module)


def test_a_whole_model_can_be_checkpointed() -> None:
    module, x = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    expected = low_by_hand(module, x.detach())
    Caster(module, POLICY)
    for reentrant in (True, False):
        module.zero_grad()
        checkpoint(module, x, use_reentrant=reentrant).float().square().sum().backward()
        assert_close([p.grad for p in module.parameters()], expected)
        assert full_precision(module)


# Copies, and the end.


def test_a_copy_computes_in_full_precision_until_it_has_a_caster_of_its_own() -> None:
    module = Probe()
    Caster(module, _MixedPrecision(param_dtype=LOW))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied(torch.randn(2, 3))
        assert copied.seen == {torch.float32}
        strip(copied)
        assert not copied._forward_pre_hooks
        assert not copied.linear._forward_hooks
        Caster(copied, POLICY)
        copied(torch.randn(2, 3))
        assert copied.seen == {LOW}
    module(torch.randn(2, 3))
    assert module.seen == {LOW}


def test_stripping_a_model_keeps_the_casters_of_its_parts_and_others_hooks() -> None:
    module = nn.Sequential(Probe())
    Caster(module[0], POLICY)
    Caster(module, POLICY)
    calls = []
    module.register_forward_hook(lambda *_: calls.append("here"))
    strip(module)
    module(torch.randn(2, 3))
    assert calls == ["here"]
    assert module[0].seen == {LOW}
    assert len(module._forward_hooks) == 1


def test_a_removed_caster_leaves_nothing_behind() -> None:
    module = Probe()
    caster = Caster(module, _MixedPrecision(param_dtype=LOW))
    caster.remove()
    for part in module.modules():
        assert not part._forward_pre_hooks
        assert not part._forward_pre_hooks_with_kwargs
        assert not part._forward_hooks
        assert not part._forward_hooks_always_called
    module(torch.randn(2, 3))
    assert module.seen == {torch.float32}


def test_a_model_with_a_caster_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        module = Probe()
        Caster(module, POLICY)
        module(torch.randn(2, 3)).sum().backward()
        gone = weakref.ref(module)
        del module
        assert gone() is None
    finally:
        gc.enable()


# Policies and inputs.


def test_torchs_own_settings_are_understood() -> None:
    theirs = TorchsMixedPrecision(param_dtype=torch.float16, buffer_dtype=LOW)
    assert _MixedPrecision.of(theirs) == _MixedPrecision(torch.float16, None, LOW)
    assert _MixedPrecision.of(POLICY) is POLICY
    with pytest.raises(TypeError, match="give a _MixedPrecision"):
        _MixedPrecision.of(torch.float16)
    with pytest.raises(ValueError, match=r"reduce_dtype is torch\.int8"):
        _MixedPrecision(reduce_dtype=torch.int8)


def test_gradients_travel_in_the_type_they_were_computed_in_unless_told_otherwise() -> None:
    assert _MixedPrecision().transfer_dtype is None
    assert _MixedPrecision(param_dtype=LOW).transfer_dtype is LOW
    assert _MixedPrecision(LOW, torch.float32).transfer_dtype is torch.float32


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Box:
    x: Tensor
    name: str = "box"
    derived: Tensor = field(init=False, default=None)


def test_floats_are_cast_in_containers_of_every_kind() -> None:
    x, n = torch.ones(2), torch.tensor(1)
    table = collections.defaultdict(list, a=x)
    found: dict[str, Any] = cast_floats(
        {"list": [x, (n, x)], "pair": Pair(x, n), "box": Box(x), "table": table, "text": "t"}, LOW
    )
    assert found["list"][0].dtype == found["list"][1][1].dtype == LOW
    assert found["list"][1][0] is n
    assert found["pair"].a.dtype == LOW
    assert type(found["pair"]) is Pair
    assert found["box"].x.dtype == LOW
    assert found["box"].name == "box"
    assert found["table"]["a"].dtype == LOW
    assert found["table"]["missing"] == []
    assert found["text"] == "t"
    assert table["a"] is x  # what the caller holds has not changed


def test_packed_sequences_are_cast() -> None:
    packed = cast_floats(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), LOW)
    assert packed.data.dtype == LOW
    assert packed.batch_sizes.dtype == torch.int64


def test_containers_in_which_nothing_changes_are_the_same_objects() -> None:
    cache = {"length": torch.tensor(3), "parts": [torch.ones(1, dtype=LOW)]}
    assert cast_floats(cache, LOW) is cache


def test_inputs_receive_their_gradients_in_their_own_precision() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    Caster(module, POLICY)
    module(input=x).sum().backward()
    assert x.grad.dtype == torch.float32


def test_complex_gradients_keep_their_imaginary_part() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.turn * self.linear(x)).imag.sum() + self.turn.real.sum()

    def one_rank(group: Group) -> Tensor:
        model = Turns()
        nn.init.constant_(model.linear.weight, 0.25)
        nn.init.zeros_(model.linear.bias)
        precision = _MixedPrecision(param_dtype=LOW)
        ddp = DistributedDataParallel(model, process_group=group, mixed_precision=precision)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 4), 1.0 + group.rank())).backward()
        return model.turn.grad

    for grad in run_ranks(2, one_rank):
        assert_close(grad, torch.full((4,), 1.0 + 1.5j))
