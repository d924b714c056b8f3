"""Inert stand-in for torchvision (text-only serving; nothing here is ever called).

SGLang 0.5.23 imports torchvision at module scope from VLM config files
(srt/multimodal/internvl_utils.py, srt/configs/deepseek_ocr.py), and once a package of
that name exists transformers imports a few more names from it.  PyPI torchvision wheels
are CUDA builds whose _C.so does not load beside a CPU torch ("torchvision::nms does not exist").
"""

__version__ = "0.28.0"


class _Unavailable:
    def __init__(self, name):
        self._name = name

    def __call__(self, *a, **k):
        raise RuntimeError(f"torchvision stub: {self._name} is not available")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable(f"{self._name}.{name}")


def _module_getattr(modname):
    def __getattr__(name):  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable(f"{modname}.{name}")

    return __getattr__
