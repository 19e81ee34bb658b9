#include "callables/storage_exchange.h"

#include <stdexcept>
#include <utility>

#include "tensors/arguments.h"

namespace pygraph::bindings {

StorageExchange::StorageExchange(const std::vector<at::Tensor>& own, std::vector<at::Tensor> given)
    : given_(std::move(given)) {
  if (own.size() != given_.size()) throw std::invalid_argument("as much memory as storages");
  for (size_t i = 0; i < own.size(); ++i) {
    if (extent_of(given_[i]) < own[i].storage().nbytes()) {
      throw std::invalid_argument("too little memory for a storage");
    }
  }
  exchanged_.reserve(own.size());  // from here on nothing throws
  for (size_t i = 0; i < own.size(); ++i) {
    const c10::Storage& storage = own[i].storage();
    if (given_[i].storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) continue;
    c10::DataPtr memory(given_[i].data_ptr(), storage.device());
    exchanged_.push_back(
        {storage, storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory))});
  }
}

StorageExchange::~StorageExchange() {
  undo();
}

void StorageExchange::undo() noexcept {
  // Backwards, should a storage be there twice.
  while (!exchanged_.empty()) {
    Exchanged& last = exchanged_.back();
    last.storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(last.memory));
    exchanged_.pop_back();
  }
}

}  // namespace pygraph::bindings
