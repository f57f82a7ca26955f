"""The four jobs of one density: more of the same, which class, which is odd, what fits; and the analyses."""
