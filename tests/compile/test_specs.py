"""Specs: inputs without memory that have the properties of the example."""

import torch

from spec_compile.compile.trace import fakes, spec_of


def test_fakes_are_as_the_example_but_for_what_varies():
    base = torch.zeros(5, 9, 8, dtype=torch.float16)
    examples = [base, base[:, ::3], base.transpose(1, 2), base[0, 0], torch.tensor(3), torch.zeros(5, 1, 35), 35, 3]
    specs = [spec_of(example, lambda size: size % 5 == 0) for example in examples]
    _, made = fakes(specs)
    for fake, example in zip(made[:-2], examples):
        assert fake.dtype == example.dtype and fake.device == example.device and fake.ndim == example.ndim
        assert [int(size) for size in fake.shape] == list(example.shape)
        assert [int(stride) for stride in fake.stride()] == list(example.stride())
        varies = [isinstance(size, torch.SymInt) for size in fake.shape]
        assert varies == [size % 5 == 0 and size > 1 for size in example.shape]
    rows, wide = {str(fake.shape[0]) for fake in (made[0], made[1], made[5])}, {str(made[5].shape[2]), str(made[6])}
    assert len(rows) == len(wide) == 1 and rows != wide, "one symbol for all dimensions of one size"
    assert int(made[7]) == 3 and isinstance(made[7], torch.SymInt)
    assert str(made[0].stride()[0]) == "72" and str(made[5].stride()[0]) == str(made[5].shape[2])
