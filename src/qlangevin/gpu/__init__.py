"""x"""
from . import launch as this_module
from .interpreter import interpreted
