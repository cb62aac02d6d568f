"""The storage of a cache: folders of this machine and object stores, behind one
interface."""
