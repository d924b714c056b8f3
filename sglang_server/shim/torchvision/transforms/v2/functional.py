from torchvision import _module_getattr
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = _module_getattr(__name__)
