"""The pictures of the documentation: ``python -m docs.figures`` draws them all in ``docs/images``.

Pictures of concepts (:mod:`.concepts`) are drawn from the objects that they explain: a mesh, a plan, layouts, phases.
Charts (:mod:`.charts`) are drawn from numbers in ``*.json`` beside this file, which ``python -m docs.figures --count``
counts anew by dry runs, and ``--train`` by training on ranks of this machine.
"""
