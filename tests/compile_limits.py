"""What the compile lane asks of the kernels; apart from the driver, which needs Triton."""

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # capability → KiB of shared memory that a block may use
CASES = (
    "text", "page", "page-bfloat16", "queries", "short-documents", "masked", "masked-zero", "normalize", "ragged",
    "ragged-both", "codes", "codes-many", "codes-wide", "train-codes", "train-codes-normalize",
    "product", "product-odd", "train-product",
    "residual", "residual-many", "residual-odd", "residual-wide", "residual-float32", "train-residual",
    "matches", "odd", "wide", "candidates", "float32-highest", "float32-high", "float32-medium",
    "float32-wide", "float32-wide-high",
    "train", "train-long", "train-float32", "train-candidates", "train-wide-normalize", "train-packed", "train-views",
    "train-packed-long", "train-pairs", "train-pairs-given", "train-views-chunks",
)  # fmt: skip
# Forward without winners at the usual widths: where a spill would show in the time (measured 2026-11-29: none).
NEVER_SPILL = (
    "text", "page", "page-bfloat16", "queries", "short-documents", "masked", "masked-zero", "normalize", "ragged",
    "odd", "codes", "residual",
    "candidates", "float32-highest", "float32-high", "float32-medium", "train-pairs",
)  # fmt: skip
HOPPER = (
    "codes-e4m3", "hopper-codes", "hopper-codes-factors", "hopper-codes-matches", "hopper-codes-e4m3",
    "hopper-codes-one-tile", "hopper-codes-wide", "hopper-codes-wider", "hopper-few-codes", "hopper-few-codes-e4m3",
    "hopper-few-codes-matches", "train-codes-e4m3", "hopper-quantized",
    "hopper-few-quantized", "hopper-few-residual", "hopper-few-residual-matches", "hopper-few-residual-long",
    "hopper-residual", "hopper-residual-one-tile", "hopper-residual-matches",
    "hopper-product", "hopper-product-matches", "hopper-few-product", "hopper-few-product-long",
    "hopper-few-product-matches", "hopper-few-product-candidates",
    "hopper", "hopper-bfloat16-wide", "hopper-unaligned", "hopper-split", "hopper-split-ragged",
    "hopper-narrow", "hopper-one-tile", "hopper-masked", "hopper-ragged",
    "hopper-matches", "hopper-train", "hopper-few", "hopper-few-ragged", "hopper-few-masked",
    "hopper-few-matches", "hopper-few-float32", "hopper-few-float32-high", "hopper-few-float32-matches",
    "hopper-float32", "hopper-float32-high", "hopper-float32-ragged",
    "hopper-float32-one-tile", "hopper-float32-matches",
    "hopper-wide", "hopper-wide-resident", "hopper-wide-matches", "hopper-masked-zero", "hopper-few-masked-zero",
    "hopper-wide-float32", "hopper-wide-float32-high", "hopper-wide-float32-matches",
    "hopper-candidates", "hopper-candidates-pages", "hopper-chosen-pairs", "hopper-candidates-matches",
    "hopper-candidates-float32",
    "hopper-few-candidates", "hopper-few-candidates-ragged", "hopper-few-candidates-float32",
)  # fmt: skip
HOPPER_QUICK = (
    "hopper-product", "hopper-few-product",
    "hopper-few-residual", "hopper-residual",
    "hopper", "hopper-few-codes", "hopper-split", "hopper-few-masked", "hopper-float32-high", "hopper-wide",
    "hopper-wide-float32",
    "hopper-candidates", "hopper-chosen-pairs",
)  # fmt: skip
# Those spill what is read once a program or at a document's end (few query rows: of float32 winners for 64 alone; many
# of float32 with winners in the loop too; of gradients what pairs need), compiled with Triton 3.6.
SPILLS = {
    "_hopper_scores_kernel": 768, "_hopper_few_kernel": 640, "_hopper_float32_kernel": 2048,
    "_hopper_wide_kernel": 768, "_hopper_wide_float32_kernel": 1536, "_gradient_kernel": 32,
    "_hopper_few_decoded_kernel": 640, "_hopper_decoded_kernel": 2560,
    "_hopper_product_kernel": 1536, "_hopper_product_scores_kernel": 1536,
}  # fmt: skip

# More than their kernel's: winners of 256 columns of e4m3.
SPILLS_OF_CASES = {"hopper-codes-e4m3": 1024}


def cases_for(capability: int) -> tuple[str, ...]:
    return CASES + HOPPER if capability == 90 else CASES
