"""Lets the real SGLang start without a GPU: stand-ins for modules of its CUDA stack that are not installed.

Loaded from a .pth file, so that the processes SGLang spawns get it too. A module of `STAND_INS` is replaced only where
the real one can't be imported: the finder is the last of sys.meta_path. SGLang imports these modules, or names of
them, while it loads; what it runs on a CPU with `torch_native` attention calls none of them.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STAND_INS = {
    "IPython",
    "av",
    "cuda_tile",
    "cutlass",
    "decord",
    "deep_gemm",
    "flashinfer",
    "gguf",
    "llguidance",
    "quack",
    "sgl_kernel",
    "tilelang",
    "torchvision",
    "triton",
    "xgrammar",
}
TRITON_VERSION = "3.7.1"  # SGLang compares it


def _decorate(*args, **kwargs):
    """Work as a decorator, with or without arguments of its own."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


class _ClassStandIn(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _ObjectStandIn(metaclass=_ClassStandIn):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _decorate(*args, **kwargs)


class _ModuleStandIn(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name == "__version__":
            return TRITON_VERSION
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if not name[:1].isupper():
            value = _ModuleStandIn(full)
            sys.modules[full] = value
        elif self.__name__.partition(".")[0] == "xgrammar":
            import pydantic  # SGLang uses xgrammar.StructuralTag as the type of a pydantic field

            value = type(name, (pydantic.BaseModel,), {"__module__": self.__name__})
        else:
            value = _ClassStandIn(name, (_ObjectStandIn,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        return _decorate(*args, **kwargs)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _ModuleStandIn(spec.name)

    def exec_module(self, module):
        pass


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
