"""On the path of processes that run SGLang without a GPU: see README.md of this folder."""

import importlib.abc
import sys


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """torchvision's own operators are in a library that is linked against CUDA and does not load here; its Python part
    registers implementations of two of them all the same. Declared by hand they have somewhere to go."""

    library = None  # lives as long as the process: with it, its operators would go

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            import torch

            sys.meta_path.remove(self)
            BeforeTorchvision.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the real one is found as ever


sys.meta_path.insert(0, BeforeTorchvision())
