"""Everything private of torch, and only here: the rest of the package reads as if it were stable.

A file is an area of torch, and a door of its own: ``from .._torch.autograd import ...``. Each name
says what it is for and what public thing would replace it. Where versions of torch differ, the
choice is made here, once. torch 2.11 to 2.15.
"""

from .versions import refuse_older

refuse_older()
