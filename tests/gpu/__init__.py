"""Every feature on several ranks of one machine's GPUs, compared with one process on all the data.

``crew.py`` keeps the ranks running from test to test; ``scene.py`` is what a test gets in a rank;
``machine.py`` finds out which device and which backend there are. Without a GPU the same tests run
on the CPU, but for those that need CUDA; ``make gpu`` wants a GPU.
"""
