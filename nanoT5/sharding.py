"""Tensors that FSDP has cut up over processes."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor, or this process's shard of it under FSDP."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def whole(tensor: Tensor) -> Tensor:
    """With the shards of all processes, each of which has to call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def sharded_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """On the parameter's device, and cut up as it is; a tensor of another shape is kept whole by every process."""
    if not isinstance(parameter, DTensor) or tensor.dim() == 0:
        return tensor.to(parameter.device)
    placements = parameter.placements if tensor.shape == parameter.shape else [Replicate()]
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, placements, src_data_rank=None)
