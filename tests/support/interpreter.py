"""Triton's interpreter without costs of its own, which makes kernels run three times faster in it."""

import dataclasses

import triton.language as tl
from triton.runtime import interpreter

PATCHED = set()  # device functions whose module's `triton.language` was once replaced by the interpreter's


def call_device_function(function, *args, **kwargs):
    """Triton searches the whole of its language at every call of a device function. The kernel that calls has replaced
    what it found in its own module, so that only the first call finds anything: `tl.core` behind functions of `tl`."""
    if function not in PATCHED:
        interpreter._patch_lang(function.fn)
        PATCHED.add(function)
    return function.rewrite()(*args, **kwargs)


def blocks(original):
    """A method: type of a block, another element's type -> the type of a block of these, which the first one keeps."""

    def with_element_ty(self, element):
        kept = self.__dict__.setdefault("_blocks", {})
        if id(element) not in kept:  # what a block's type refers to keeps its id
            kept[id(element)] = original(self, element)
        return kept[id(element)]

    return with_element_ty


def numpy_types(original):
    """A function: type -> its data type in NumPy, for which Triton fills a table at each call."""
    types = {}

    def numpy_type(type):
        if type.name not in types:
            types[type.name] = original(type)
        return types[type.name]

    return numpy_type


def tensor_init(original):
    """The constructor of a tensor, which takes what follows from the type from the last tensor of this type."""

    def __init__(self, handle, type):
        facts = type.__dict__.get("_facts")
        if facts is None:
            original(self, handle, type)
            type._facts = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            self.__dict__.update(facts)
            self.handle = handle

    return __init__


def hasten() -> None:
    """From now on. Sums and products of integers are not done again in 64 bits, which a GPU does not do either."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._get_np_dtype = numpy_types(interpreter._get_np_dtype)
    tl.tensor.__init__ = tensor_init(tl.tensor.__init__)
    tl.block_type.with_element_ty = blocks(tl.block_type.with_element_ty)
