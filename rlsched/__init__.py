"""rlsched: scheduling policies for RL post-training, written once; simulated, run, checked and compared.

``rlsched.controller`` is the heart, ``rlsched.policy`` the presets, ``rlsched.slots`` what they are
made of. ``rlsched.sim`` and ``rlsched.real`` are the two worlds.
"""

__version__ = "0.1.0"
