"""One torch thread: the suite shares two cores."""

import torch

torch.set_num_threads(1)
