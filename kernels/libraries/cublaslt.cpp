// out = res + x W^T + b by cuBLASLt in one pass: D = A B + C + bias with C and D apart, which torch does not offer.
//
// This is a C interface for cublaslt.py, which keeps what `choose` finds and brings handle, workspace and stream.
// Nothing is kept here, so any thread may call. Both functions return nullptr, or a message about what went wrong.
//
// cuBLASLt is column-major: x (M, K) in rows is x^T (K, M) in columns. So it is asked for out^T (N, M) = W x^T + res^T,
// with W (N, K) transposed from what it takes for (K, N); b (N,) then goes down the columns as its bias epilogue does.

#include <exception>
#include <stdexcept>
#include <string>

// cublasLt.h names two types of the fp16 and bf16 headers, which need CUDA's C++ library: not every torch brings it.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>

// The fields are in the order of Problem in cublaslt.py: strides from row to row in elements, types of cudaDataType,
// alignments in bytes.
struct Problem {
  int64_t rows, columns, depth;  // M, N, K
  int64_t stride_x, stride_w, stride_res, stride_out;
  int64_t type, out_type;  // of x and W; of b, res and out
  int64_t align_x, align_w, align_bias, align_res, align_out;  // align_bias 0: no bias
};

struct Choice {
  uint64_t workspace;  // bytes that the algorithm needs
  cublasLtMatmulAlgo_t algorithm;
};
static_assert(sizeof(Choice) == 72, "cublaslt.py holds it as nine 64-bit words");

namespace {

void check(const char* function, cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(function) + " says " + cublasLtGetStatusName(status));
}

struct Matmul {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t w, x, res, out;  // A, B, C, D

  Matmul(const Problem& p, const void* bias) {
    const auto type = cudaDataType(p.type), out_type = cudaDataType(p.out_type);
    layout(w, type, p.depth, p.columns, p.stride_w);
    layout(x, type, p.depth, p.rows, p.stride_x);
    layout(res, out_type, p.columns, p.rows, p.stride_res);
    layout(out, out_type, p.columns, p.rows, p.stride_out);
    check("cublasLtMatmulDescInit", cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);  // of D's type
    }
  }

  static void layout(cublasLtMatrixLayoutOpaque_t& m, cudaDataType type, int64_t rows, int64_t columns,
                     int64_t stride) {
    check("cublasLtMatrixLayoutInit", cublasLtMatrixLayoutInit(&m, type, rows, columns, stride));
  }

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check("cublasLtMatmulDescSetAttribute",
          cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
  }
};

struct Preference {
  cublasLtMatmulPreferenceOpaque_t opaque;

  Preference(const Problem& p, uint64_t workspace) {
    check("cublasLtMatmulPreferenceInit", cublasLtMatmulPreferenceInit(&opaque));
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    // K in slices only where they are added up in fp32, by a second pass: the other schemes round them to 16 bit first.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(p.align_w));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(p.align_x));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(p.align_res));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(p.align_out));
  }

  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check("cublasLtMatmulPreferenceSetAttribute",
          cublasLtMatmulPreferenceSetAttribute(&opaque, attribute, &value, sizeof(value)));
  }
};

template <typename F>
const char* said(F&& run) {
  static thread_local std::string message;
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

// The best algorithm by cuBLASLt's own judgement that needs no more workspace than this.
extern "C" const char* vitfast_choose(cublasLtHandle_t handle, const Problem* problem, uint64_t workspace,
                                      Choice* choice) {
  return said([&] {
    // The bias is not read here; only the alignment of its address counts.
    Matmul m(*problem, reinterpret_cast<const void*>(problem->align_bias));
    Preference preference(*problem, workspace);
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    check("cublasLtMatmulAlgoGetHeuristic", cublasLtMatmulAlgoGetHeuristic(
        handle, &m.operation, &m.w, &m.x, &m.res, &m.out, &preference.opaque, 1, &best, &found));
    if (!found) throw std::runtime_error("cublasLtMatmulAlgoGetHeuristic finds no algorithm");
    check("the algorithm found", best.state);
    *choice = {best.workspaceSize, best.algo};
  });
}

extern "C" const char* vitfast_run(cublasLtHandle_t handle, const Problem* problem, const Choice* choice, const void* x,
                                   const void* w, const void* bias, const void* res, void* out, void* workspace,
                                   cudaStream_t stream) {
  return said([&] {
    Matmul m(*problem, bias);
    const float one = 1;
    check("cublasLtMatmul", cublasLtMatmul(handle, &m.operation, &one, w, &m.w, x, &m.x, &one, res, &m.res, out, &m.out,
                                           &choice->algorithm, workspace, choice->workspace, stream));
  });
}
