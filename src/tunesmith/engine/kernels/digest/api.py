"""Digests of the bytes of tensors, in C++ or in torch; both give the same numbers, on every machine."""

import ctypes
from collections.abc import Sequence

import torch

from tunesmith.engine.kernels.arguments import INTEGER, POINTER, function_of
from tunesmith.engine.kernels.digest import torch_impl
from tunesmith.engine.kernels.native import Kernels


class _Bytes(ctypes.Structure):
    _fields_ = (("values", POINTER), ("size", INTEGER))


def digests(tensors: Sequence[torch.Tensor], *, kernels: Kernels) -> list[int]:
    """A number of 64 bits for the bytes of each tensor, of any dtype, in the order of its elements.

    One pass over memory on all threads. A change gives another number but for a chance of about 2^-62, unless
    somebody chooses the bytes for it. `torch_impl.digest` is the definition.

    Raises:
        NativeUnavailableError: `native` was chosen and cannot run.
    """
    # There is no Triton kernel: on a GPU torch's own operations are fast enough.
    on_cpu = kernels.choice != "triton" and all(tensor.device.type == "cpu" for tensor in tensors)
    library = kernels.library("digest", torch.device("cpu")) if tensors and on_cpu else None
    if library is None:
        return [torch_impl.digest(tensor) for tensor in tensors]
    dense = [tensor.detach().contiguous() for tensor in tensors]  # the name holds copies until the call is over
    items = (_Bytes * len(dense))(*(_Bytes(tensor.data_ptr(), tensor.nbytes) for tensor in dense))
    found = (ctypes.c_uint64 * len(dense))()
    function_of(library, "digests", (POINTER, INTEGER, POINTER, INTEGER))(
        ctypes.addressof(items), len(dense), ctypes.addressof(found), torch.get_num_threads()
    )
    return list(found)
