"""The same model with the same parameters, computed faster.

:func:`~annotated_transformer.fast.model.can_accelerate` says which models are supported. All others
(with hooks, subclasses or replaced methods) run through the readable layer in ``model``.
"""
