"""Operators of torch whose names begin with an underscore, as they are: an alias costs a step nothing.

Private: `torch._foreach_*`, `torch._amp_*` and `torch.ops.aten._upsample_bilinear2d_aa`; torch 2.10 to 2.13.
Why: a public function for each tensor takes a launch for each of them. torch's optimizers and its GradScaler call the
same operators. Of the last one, `torch.nn.functional.interpolate(antialias=True)` has no `out`.
When it goes: replace the list operators by a loop over the public function of the same name, the second group by
`tensor.mul_(factor)` with `tensor.isfinite()`, and by arithmetic on the scale, and the last one by `interpolate`.
"""

from __future__ import annotations

import torch

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_

amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_

upsample_bilinear2d_aa = torch.ops.aten._upsample_bilinear2d_aa
