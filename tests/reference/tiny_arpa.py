"""A trigram model small enough to work by hand."""

TINY = """\\data\\
ngram 1=5
ngram 2=4
ngram 3=1

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.5
-0.6\t</s>
-0.5\ta\t-0.3
-0.7\tb\t-0.2

\\2-grams:
-0.2\t<s> a\t-0.1
-0.4\ta b\t0.0
-0.3\tb </s>
-0.9\tb a

\\3-grams:
-0.05\t<s> a b

\\end\\
"""
