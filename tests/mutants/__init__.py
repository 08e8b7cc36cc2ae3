"""Small planted mistakes in the pure rooms, by the thousand: do the tests notice?"""
