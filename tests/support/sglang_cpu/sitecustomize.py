"""Imported by processes that run SGLang without a GPU; see this folder's README.md."""

import importlib.abc
import sys


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares two of torchvision's operators before it is imported. Its library is linked against CUDA and does not
    load here, but its Python part registers implementations of them, which fails for undeclared operators."""

    library = None  # kept for the life of the process: its operators are deleted with it

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            import torch

            sys.meta_path.remove(self)
            BeforeTorchvision.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # let the other finders find the real one


sys.meta_path.insert(0, BeforeTorchvision())
