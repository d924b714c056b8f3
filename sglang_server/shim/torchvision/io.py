from . import _module_getattr

__getattr__ = _module_getattr(__name__)
