// What cublaslt.cpp calls of cuBLASLt, on the CPU and as its documentation says: column-major matrices, D rounded once.
// It refuses what a GPU would not forgive: addresses less aligned than promised, too small a workspace, another problem
// than the algorithm was chosen for, reductions that round to 16 bit. Compiled together with cublaslt.cpp.

#include <cstring>

#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>

namespace {

struct Layout {
  uint64_t type, rows, columns;
  int64_t stride;

  bool fits(uint64_t r, uint64_t c) const { return rows == r && columns == c && stride >= int64_t(rows) && rows; }
};

struct Operation {
  int64_t compute, scale;
  uint64_t transpose_a, transpose_b, epilogue;
  const void* bias;
};

struct Preference {
  uint64_t workspace, reductions, alignment[4];
};

// In the place of the algorithm: the problem that it was chosen for.
struct Algorithm {
  uint32_t m, n, k, magic;
  uint64_t strides;
  uint64_t alignment[5];  // of A, B, C, D, bias
};

const uint32_t MAGIC = 0xC0B1A5;
const uint64_t WORKSPACE = 4096;

template <typename T, typename S>
T& as(S* opaque) {
  static_assert(sizeof(T) <= sizeof(S));
  return *reinterpret_cast<T*>(opaque);
}

template <typename T, typename S>
const T& as(const S* opaque) {
  return *reinterpret_cast<const T*>(opaque);
}

template <typename T>
cublasStatus_t take(T& where, const void* value, size_t size, size_t expected) {
  if (size != expected || size > sizeof(where)) return CUBLAS_STATUS_INVALID_VALUE;
  memset(&where, 0, sizeof(where));
  memcpy(&where, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

double load(const void* p, uint64_t type, int64_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(p)[i];
  if (type == CUDA_R_16F) return static_cast<const _Float16*>(p)[i];
  uint32_t bits = uint32_t(static_cast<const uint16_t*>(p)[i]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void store(void* p, uint64_t type, int64_t i, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(p)[i] = value;
  } else if (type == CUDA_R_16F) {
    static_cast<_Float16*>(p)[i] = value;
  } else {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(p)[i] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
}

bool aligned(const void* p, uint64_t alignment) { return reinterpret_cast<uintptr_t>(p) % alignment == 0; }

uint64_t mixed(const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  return ((a.stride * 31 + b.stride) * 31 + c.stride) * 31 + d.stride;
}

// op(A) (m, k), op(B) (k, n), C and D (m, n)
bool consistent(const Operation& o, const Layout& a, const Layout& b, const Layout& c, const Layout& d, uint64_t k) {
  const uint64_t m = d.rows, n = d.columns;
  return o.compute == CUBLAS_COMPUTE_32F && o.scale == CUDA_R_32F && d.fits(m, n) && c.fits(m, n) && a.type == b.type &&
         c.type == d.type && (d.type == a.type || d.type == CUDA_R_32F) &&
         (o.transpose_a == CUBLAS_OP_T ? a.fits(k, m) : a.fits(m, k)) &&
         (o.transpose_b == CUBLAS_OP_T ? b.fits(n, k) : b.fits(k, n)) &&
         (o.epilogue == CUBLASLT_EPILOGUE_DEFAULT || (o.epilogue == CUBLASLT_EPILOGUE_BIAS && o.bias));
}

int heuristics = 0;
void* stream_used = nullptr;

}  // namespace

extern "C" {

int stub_heuristics() { return heuristics; }
void* stub_stream() { return stream_used; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_EXECUTION_FAILED";
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t matrix, size_t, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t stride) {
  as<Layout>(matrix) = {uint64_t(type), rows, columns, stride};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t o, size_t, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  as<Operation>(o) = {compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  auto& o = as<Operation>(desc);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return take(o.transpose_a, value, size, 4);
    case CUBLASLT_MATMUL_DESC_TRANSB: return take(o.transpose_b, value, size, 4);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return take(o.epilogue, value, size, 4);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(o.bias, value, size, 8);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t) {
  as<Preference>(preference) = {0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t size) {
  auto& p = as<Preference>(preference);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(p.workspace, value, size, 8);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(p.reductions, value, size, 4);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(p.alignment[0], value, size, 4);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(p.alignment[1], value, size, 4);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(p.alignment[2], value, size, 4);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(p.alignment[3], value, size, 4);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

// K = 13: no algorithm; K = 11: none supported.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t* result, int* found) {
  ++heuristics;
  const auto& o = as<Operation>(desc);
  const auto& p = as<Preference>(preference);
  const auto &A = as<Layout>(a), &B = as<Layout>(b), &C = as<Layout>(c), &D = as<Layout>(d);
  const uint64_t k = o.transpose_b == CUBLAS_OP_T ? B.columns : B.rows;
  if (wanted != 1 || p.workspace < WORKSPACE || !consistent(o, A, B, C, D, k)) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.reductions & ~uint64_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) return CUBLAS_STATUS_INVALID_VALUE;
  if (k == 11) return CUBLAS_STATUS_NOT_SUPPORTED;
  *found = k == 13 ? 0 : 1;
  const auto bias = reinterpret_cast<uintptr_t>(o.bias);
  const Algorithm chosen{uint32_t(D.rows), uint32_t(D.columns), uint32_t(k), MAGIC, mixed(A, B, C, D),
                         {p.alignment[0], p.alignment[1], p.alignment[2], p.alignment[3], bias & -bias}};
  as<Algorithm>(&result->algo) = chosen;
  result->workspaceSize = WORKSPACE;
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

// Handle 1: fails.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t size, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(handle) == 1) return CUBLAS_STATUS_EXECUTION_FAILED;
  const auto& o = as<Operation>(desc);
  const auto& chosen = as<Algorithm>(algorithm);
  const auto &A = as<Layout>(a_layout), &B = as<Layout>(b_layout), &C = as<Layout>(c_layout), &D = as<Layout>(d_layout);
  const uint64_t k = chosen.k;
  if (!consistent(o, A, B, C, D, k) || chosen.magic != MAGIC || chosen.m != D.rows || chosen.n != D.columns ||
      chosen.strides != mixed(A, B, C, D) || size < WORKSPACE || !workspace || c == d)
    return CUBLAS_STATUS_INVALID_VALUE;
  const void* addresses[] = {a, b, c, d, o.bias};
  for (int i = 0; i < (o.bias ? 5 : 4); ++i)
    if (!chosen.alignment[i] || !aligned(addresses[i], chosen.alignment[i])) return CUBLAS_STATUS_INVALID_VALUE;
  memset(workspace, 0xFF, size);
  stream_used = stream;
  for (uint64_t j = 0; j < D.columns; ++j)
    for (uint64_t i = 0; i < D.rows; ++i) {
      double sum = 0;
      for (uint64_t l = 0; l < k; ++l)
        sum += load(a, A.type, o.transpose_a == CUBLAS_OP_T ? l + i * A.stride : i + l * A.stride) *
               load(b, B.type, o.transpose_b == CUBLAS_OP_T ? j + l * B.stride : l + j * B.stride);
      sum *= *static_cast<const float*>(alpha);
      sum += *static_cast<const float*>(beta) * load(c, C.type, i + j * C.stride);
      if (o.epilogue == CUBLASLT_EPILOGUE_BIAS) sum += load(o.bias, D.type, i);
      store(d, D.type, i + j * D.stride, float(sum));
    }
  return CUBLAS_STATUS_SUCCESS;
}
}
