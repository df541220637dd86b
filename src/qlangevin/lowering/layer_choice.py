"""Choice of the modules that are layers, and of those whose forwards have their functions lowered.

a layer of PyTorch (`LAYERS`)                 lowered; its own functions are hidden
a module of the user's without children       lowered; its own functions are followed, see `LeafHandler`
a module with children, and the whole model   its functions are lowered
what is skipped or not chosen                 its functions are followed
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import activation, batchnorm, conv, dropout, loss, pooling

from .functions import EnterLayer, FunctionSettings, LeaveLayer, ScopedForward, find_scope
from .modules import Quantize, is_leaf_of_user
from .patches import Patch, remove_patch

__all__ = ["LAYERS", "is_layer", "scope_functions"]


def _modules_of(package: Any) -> list[type[nn.Module]]:
    return [getattr(package, name) for name in package.__all__]


# The modules of PyTorch that are layers. Log-softmax is none: it belongs to the loss.
LAYERS: tuple[type[nn.Module], ...] = (
    *[nn.Linear, nn.Bilinear, conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase],
    *[batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d],
    *[t for t in _modules_of(activation) if t is not nn.LogSoftmax],
    *[*_modules_of(pooling), *_modules_of(dropout), nn.Upsample, Quantize],
)


def is_layer(name: str, module: nn.Module) -> bool:
    """Return True for the layers of PyTorch and for modules of the user's without children, but losses and parametrizations.

    The model itself, whose name is "", is a layer only if it is one of PyTorch's.
    """
    if isinstance(module, LAYERS):
        return True
    is_loss = isinstance(module, loss._Loss) or type(module).__name__.endswith("Loss")
    return name != "" and "parametrizations" not in name.split(".") and is_leaf_of_user(module) and not is_loss


def scope_functions(
    model: nn.Module, settings: FunctionSettings, layers: set[nn.Module], where: set[nn.Module]
) -> None:
    """Have the functions of modules in ``where`` lowered, and those of others followed; ``layers`` are the lowered modules.

    A model whose modules call no functions, such as a plain `nn.Sequential`, stays without a mode.
    """
    callers = {
        m: name for name, m in model.named_modules() if _calls_functions(m) and not (m in layers and _is_hidden(m))
    }
    lowered = {
        m for m, name in callers.items() if m in where and (_has_children(m) or (name == "" and m not in layers))
    }
    if not (lowered and settings.names) and not any(is_leaf_of_user(m) for m in layers):
        return
    for module in layers:
        if _is_hidden(module):
            _hide_functions(module)
    for module, name in callers.items():
        _scope(module, name, settings if module in lowered else settings._replace(names=frozenset()))


def _is_hidden(layer: nn.Module) -> bool:
    """Return True for a layer whose own functions nobody looks at."""
    return not is_leaf_of_user(layer) and not _has_children(layer)


def _calls_functions(module: nn.Module) -> bool:
    """Return False for containers and identities, which have no calls of their own."""
    return type(module).forward not in (nn.Module.forward, nn.Sequential.forward, nn.Identity.forward, Quantize.forward)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _hide_functions(module: nn.Module) -> None:
    remove_patch(module, ScopedForward)
    if not any(isinstance(hook, LeaveLayer) for hook in module._forward_hooks.values()):
        module.register_forward_pre_hook(EnterLayer())
        module.register_forward_hook(LeaveLayer(), always_call=True)  # also if the layer raises


def _scope(module: nn.Module, name: str, settings: FunctionSettings) -> None:
    """Lower or follow the functions of a module, unless an earlier call of `lower` has lowered them already."""
    before = find_scope(module)
    if before is not None and (before.settings.names or not settings.names):
        return
    if any(isinstance(hook, LeaveLayer) for hook in module._forward_hooks.values()):
        return  # a layer that an earlier call has lowered
    remove_patch(module, ScopedForward)
    patch: Patch = ScopedForward(module, name, settings)
    patch.install()
