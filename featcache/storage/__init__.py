"""Where the bytes of a cache lie: folders of this machine and object stores, behind one
interface."""
