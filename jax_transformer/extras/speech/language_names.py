"""English names of Whisper's languages, as ``--language`` and files of settings may call them.

Codes and names of ``tokenization_whisper.py`` of transformers 5.23.
"""

_NAMES = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian,
bg bulgarian, bn bengali, bo tibetan, br breton, bs bosnian, ca catalan, ca valencian, cs czech,
cy welsh, da danish, de german, el greek, en english, es castilian, es spanish, et estonian,
eu basque, fa persian, fi finnish, fo faroese, fr french, gl galician, gu gujarati, ha hausa,
haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian, ht haitian creole, hu hungarian,
hy armenian, id indonesian, is icelandic, it italian, ja japanese, jw javanese, ka georgian,
kk kazakh, km khmer, kn kannada, ko korean, la latin, lb letzeburgesch, lb luxembourgish,
ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam,
mn mongolian, mr marathi, ms malay, mt maltese, my burmese, my myanmar, ne nepali, nl dutch,
nl flemish, nn nynorsk, no norwegian, oc occitan, pa panjabi, pa punjabi, pl polish, ps pashto,
ps pushto, pt portuguese, ro moldavian, ro moldovan, ro romanian, ru russian, sa sanskrit,
sd sindhi, si sinhala, si sinhalese, sk slovak, sl slovenian, sn shona, so somali, sq albanian,
sr serbian, su sundanese, sv swedish, sw swahili, ta tamil, te telugu, tg tajik, th thai,
tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek, vi vietnamese,
yi yiddish, yo yoruba, yue cantonese, zh chinese, zh mandarin
"""
CODES = {
    name: code
    for code, _, name in (entry.partition(" ") for entry in " ".join(_NAMES.split()).split(", "))
}
"""The code of each language by its name."""


def code(language: str) -> str:
    """The code of a language that is named by its code, its token or its English name."""
    language = language.removeprefix("<|").removesuffix("|>").lower()
    return CODES.get(language, language)
