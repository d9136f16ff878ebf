"""What every launch of attention asks of the machine it runs on."""

import torch

from disagg.kernels.shape import AMD_COLUMNS, NVIDIA_COLUMNS

NVIDIA = torch.version.hip is None
TENSOR_COLUMNS = NVIDIA_COLUMNS if NVIDIA else AMD_COLUMNS


def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors; one in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
