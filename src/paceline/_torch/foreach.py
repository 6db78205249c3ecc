"""One operation on many tensors: a launch for all of them where a device has such a kernel.

torch's own optimizers are made of these. They have no public names; without them each tensor would
be a call. The functions themselves are bound here, so that a call costs what it costs in torch, and
Dynamo knows them.
"""

from __future__ import annotations

import torch

add = torch._foreach_add
add_ = torch._foreach_add_
copy_ = torch._foreach_copy_
div = torch._foreach_div
div_ = torch._foreach_div_
maximum_ = torch._foreach_maximum_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
neg = torch._foreach_neg
norm = torch._foreach_norm
sqrt = torch._foreach_sqrt
sub = torch._foreach_sub
sub_ = torch._foreach_sub_

unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors by a number, and set another to 1 where a result is not finite: one kernel;
``isfinite`` and a product would read all of it twice. What ``torch.amp.GradScaler`` does."""
