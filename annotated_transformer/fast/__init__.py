"""The same model, faster: the same parameters, computed another way.

:func:`~annotated_transformer.fast.model.can_accelerate` says which models it takes over. Where it
cannot (hooks, subclasses, changed methods), the readable layer in ``model`` runs.
"""
